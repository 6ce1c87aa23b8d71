//! The guest's first process: lends buffers for sends to the host, and runs the project's tests.

use super::guest_tools::{call, connect};
use super::peer::{READ_LATER, READ_NOW, RELEASE, byte_at};
use super::{
    ALL_FILE, ARGUMENTS_FILE, COMMAND, COUNTS_FILE, FAILED, GUEST, HOST, MODULE_LIST_FILE, PASSED,
    STARTED, VmError, counts, guest_path, power_cut, python, step, tests,
};
use haul::{BufferPool, LoanOutcome, PooledBuffer, SendReport, Sender};
use rustix::mount::MountFlags;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream, UdpSocket};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Parameter of the kernel's command line with the host's port.
///
/// The kernel passes parameters that it does not know to the first process, as its environment.
pub(super) const PORT_KEY: &str = "HAUL_VM_PEER";
/// Time until all loans must have been returned.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Returned buffers are filled with this byte. If the kernel still sent from one, the host would
/// receive it.
const OVERWRITE_BYTE: u8 = 0xEE;

/// Runs the guest and powers it off, if this process is a guest's first process.
///
/// Returns `None` in any other process.
pub fn run_if_first_process() -> Option<ExitCode> {
    // A container's first process has the process ID 1 too, but not this variable.
    let port = std::env::var(PORT_KEY).ok().filter(|_| std::process::id() == 1)?.parse();
    let port = port.map_err(|_| VmError::Guest(format!("{PORT_KEY} is not a port")));
    println!("{STARTED}");
    let receives = fs::exists(power_cut::DISK_FOLDER).unwrap_or_default();
    let has_counts = fs::exists(format!("/{COUNTS_FILE}")).unwrap_or_default();
    let work = |port| match fs::read_to_string(format!("/{ARGUMENTS_FILE}")) {
        _ if receives => power_cut::receive(),
        _ if has_counts => counts::count_all(port),
        Ok(arguments) => call(COMMAND, &arguments.lines().collect::<Vec<_>>()),
        Err(_) => run(port),
    };
    match port.and_then(|port| prepare().and_then(|()| work(port))) {
        Ok(()) => println!("{PASSED}"),
        Err(error) => println!("{FAILED}: {error}"),
    }
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    Some(ExitCode::FAILURE)
}

/// Mounts file systems, loads the kernel modules and configures the network.
fn prepare() -> Result<(), VmError> {
    // Nothing on /tmp, which may hold the command: the root is in memory itself.
    for (kind, folder) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        rustix::mount::mount(kind, folder, kind, MountFlags::empty(), None)
            .map_err(|errno| step(format!("mounting {folder}"))(errno.into()))?;
    }
    let modules = fs::read_to_string(format!("/{MODULE_LIST_FILE}"))
        .map_err(step("reading the list of modules"))?;
    for name in modules.lines() {
        let file = File::open(format!("/modules/{name}.ko"))
            .map_err(step(format!("opening module {name}")))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(step(format!("loading module {name}"))(errno.into())),
        }
    }
    let address = format!("{GUEST}/24");
    call("ip", &["link", "set", "lo", "up"])?;
    call("ip", &["address", "add", &address, "dev", "eth0"])?;
    call("ip", &["link", "set", "eth0", "up"])
}

/// Runs all checks of the guest against the host's `port`.
fn run(port: u16) -> Result<(), VmError> {
    let kernel = rustix::system::uname();
    println!("haul guest: Linux {}", kernel.release().to_string_lossy());
    for buffer_bytes in [10 << 10, 16 << 10, 64 << 10, 1 << 20] {
        let (report, outcomes) = lend(port, 8 << 20, buffer_bytes)?;
        let copied = outcomes.copied;
        println!(
            "loans of {buffer_bytes} bytes to the host: {} zero-copied, {copied} copied; \
             {} bytes arrived unchanged",
            outcomes.zero_copied, report.loans.bytes
        );
        check(copied == 0 && report.fallbacks.is_empty(), || {
            format!("loans were copied: {report:?}")
        })?;
    }
    check_stalled_reader(port)?;
    check_dropped_sender(port)?;
    check_datagrams(port)?;
    for impairment in
        ["loss 2%", "delay 2ms reorder 25% 50%", "duplicate 5%", "delay 1ms loss 1% reorder 20%"]
    {
        let arguments: Vec<&str> = ["qdisc", "replace", "dev", "eth0", "root", "netem"]
            .into_iter()
            .chain(impairment.split(' '))
            .collect();
        call("tc", &arguments)?;
        let (report, outcomes) = lend(port, 4 << 20, 64 << 10)?;
        println!(
            "netem {impairment}: {} loans zero-copied, {} copied; {} bytes arrived unchanged",
            outcomes.zero_copied, outcomes.copied, report.loans.bytes
        );
    }
    call("tc", &["qdisc", "delete", "dev", "eth0", "root"])?;
    check_kernel_tls()?;
    python::check(port)?;
    run_tests()
}

/// Runs the project's tests; fails after the last of them if any failed.
fn run_tests() -> Result<(), VmError> {
    let mut failures = Vec::new();
    let all = fs::exists(format!("/{ALL_FILE}")).unwrap_or_default();
    for (package, file, arguments) in tests(all) {
        let started = Instant::now();
        let name = format!("{package}, {file} {arguments}").trim_end().to_owned();
        let mut test = Command::new(format!("/{}", guest_path(package, file)))
            .args(arguments.split_whitespace())
            .env("HAUL_TEST_MIB", "2")
            .stdout(Stdio::piped())
            .spawn()
            .map_err(step(format!("running the tests of {name}")))?;
        // If the arguments select no test, the run counts as failed.
        let mut is_passed = true;
        for line in test.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            let line = line.map_err(step("reading the output of tests"))?;
            is_passed &= !line.contains(" 0 passed");
            println!("{line}");
        }
        is_passed &= test.wait().map_err(step("waiting for tests"))?.success();
        let result = if is_passed { "pass" } else { "FAIL" };
        println!("the tests of {name}: {result} ({:.0?})", started.elapsed());
        if !is_passed {
            failures.push(name);
        }
    }
    check(failures.is_empty(), || format!("tests fail in the guest: {}", failures.join("; ")))
}

/// Numbers of returned loans by their outcome.
#[derive(Default)]
struct Outcomes {
    zero_copied: usize,
    copied: usize,
}

/// Lets the host read from the connections that wait for it.
fn release(port: u16) -> Result<(), VmError> {
    connect(port)?.write_all(&[RELEASE]).map_err(step("beginning a connection"))
}

/// Sends `total` bytes of the test stream from lent buffers and waits for the host's verdict.
///
/// Each buffer is overwritten as soon as it is returned.
fn lend(port: u16, total: u64, buffer_bytes: usize) -> Result<(SendReport, Outcomes), VmError> {
    let connection = connect(port)?;
    let mut replies = connection.try_clone().map_err(step("cloning a socket"))?;
    let mut sender = new_sender(connection, READ_NOW)?;
    let pool = new_pool(buffer_bytes, 65)?;
    let mut outcomes = Outcomes::default();
    let mut position = lend_first(&mut sender)?;
    while position < total {
        position += lend_next(&mut sender, &pool, position)?;
        reclaim_all(&mut sender, &mut outcomes)?;
    }
    let in_flight = sender.wait_for_completions(TIMEOUT).map_err(failed)?;
    reclaim_all(&mut sender, &mut outcomes)?;
    check(in_flight == 0 && pool.in_use() == 0, || {
        format!("{} buffers not returned", pool.in_use())
    })?;
    replies.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_reply(&mut replies, position)?;
    Ok((sender.report(), outcomes))
}

/// Checks loans to a host that does not read: those that do not fit into its buffers stay with the
/// kernel. Returned buffers are overwritten, which must not change the bytes that arrive.
fn check_stalled_reader(port: u16) -> Result<(), VmError> {
    let connection = connect(port)?;
    connection.set_nonblocking(true).map_err(step("setting O_NONBLOCK"))?;
    let mut replies = connection.try_clone().map_err(step("cloning a socket"))?;
    let mut sender = new_sender(connection, READ_LATER)?;
    let pool = new_pool(256 << 10, 64)?;
    let mut outcomes = Outcomes::default();
    let mut position = lend_first(&mut sender)?;
    while let Ok(count) = lend_next(&mut sender, &pool, position) {
        position += count;
        reclaim_all(&mut sender, &mut outcomes)?;
    }
    thread::sleep(Duration::from_millis(500));
    reclaim_all(&mut sender, &mut outcomes)?;
    let in_flight = sender.report().outstanding_loans;
    check(in_flight > 0, || "the kernel returned every loan before the host read".into())?;
    release(port)?;
    let deadline = Instant::now() + TIMEOUT;
    while sender.flush().is_err()
        || sender.wait_for_completions(Duration::from_millis(10)).map_err(failed)? > 0
    {
        check(Instant::now() < deadline, || {
            format!("loans were not returned: {:?}", sender.report())
        })?;
        reclaim_all(&mut sender, &mut outcomes)?;
    }
    reclaim_all(&mut sender, &mut outcomes)?;
    replies.set_nonblocking(false).map_err(step("setting the mode"))?;
    replies.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_reply(&mut replies, position)?;
    println!(
        "stalled reader: {in_flight} loans stayed in flight and were returned once the host read; \
         {position} bytes arrived unchanged"
    );
    check(outcomes.copied == 0 && pool.in_use() == 0, || format!("{:?}", sender.report()))
}

/// Checks that the loans of a dropped sender stay with the kernel until the host has read them.
fn check_dropped_sender(port: u16) -> Result<(), VmError> {
    let connection = Arc::new(connect(port)?);
    connection.set_nonblocking(true).map_err(step("setting O_NONBLOCK"))?;
    let mut sender = new_sender(Arc::clone(&connection), READ_LATER)?;
    let pool = new_pool(16 << 10, 16)?;
    let mut position = lend_first(&mut sender)?;
    // They fit into the socket's buffer: a sender that is dropped with part of a loan unsent resets
    // the connection.
    for _ in 0..3 {
        position += lend_next(&mut sender, &pool, position)?;
    }
    check(sender.unsent_bytes() == 0, || "the socket has not accepted the loans".into())?;
    sender.reclaim().map_err(failed)?.for_each(drop);
    let in_flight = pool.in_use();
    drop(sender);
    release(port)?;
    let deadline = Instant::now() + TIMEOUT;
    while pool.in_use() > 0 {
        check(Instant::now() < deadline, || format!("{} buffers not returned", pool.in_use()))?;
        thread::sleep(Duration::from_millis(5));
    }
    connection.set_nonblocking(false).map_err(step("setting the mode"))?;
    connection.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_reply(&mut &*connection, position)?;
    println!(
        "dropped sender: {in_flight} buffers in flight, all returned once the host had read; \
         {position} bytes arrived unchanged"
    );
    Ok(())
}

/// Checks loans that the kernel segments into datagrams, also next to a send that fails.
fn check_datagrams(port: u16) -> Result<(), VmError> {
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(step("making a datagram socket"))?;
    socket.connect((HOST, port)).map_err(step("connecting a datagram socket"))?;
    let mut sender = Sender::new(socket).map_err(failed)?;
    let pool = new_pool(64 << 10, 2)?;
    let mut buffer = pool.take().map_err(failed)?;
    buffer.resize(40 * 1472).map_err(failed)?;
    sender.lend_segments(buffer, 1472).map_err(failed)?;
    let in_flight = sender.wait_for_completions(TIMEOUT).map_err(failed)?;
    let outcomes: Vec<LoanOutcome> =
        sender.reclaim().map_err(failed)?.map(|returned| returned.outcome).collect();
    println!("40 datagrams in one loan: {outcomes:?}");
    check(in_flight == 0 && outcomes == [LoanOutcome::ZeroCopied], || {
        format!("{:?}", sender.report())
    })?;
    // A send whose segments do not fit into a packet fails after the kernel has counted it. All
    // loans before and after it must be returned.
    sender.lend_segments(vec![0; 40 * 1472], 1472).map_err(failed)?;
    let refused = sender.lend_segments(vec![1; 20_000], 5000);
    check(refused.is_err(), || "the kernel accepted a segment larger than the MTU".into())?;
    for _ in 0..5 {
        sender.lend_segments(vec![2; 40 * 1472], 1472).map_err(failed)?;
    }
    let in_flight = sender.wait_for_completions(TIMEOUT).map_err(failed)?;
    let outcomes: Vec<LoanOutcome> =
        sender.reclaim().map_err(failed)?.map(|returned| returned.outcome).collect();
    println!("datagrams before and after a failed one: {outcomes:?}");
    check(in_flight == 0 && outcomes.len() == 6, || format!("{:?}", sender.report()))
}

/// Checks that the kernel lists kTLS and that `haul doctor` can install it on a socket.
fn check_kernel_tls() -> Result<(), VmError> {
    let file = "/proc/sys/net/ipv4/tcp_available_ulp";
    let available = fs::read_to_string(file).map_err(step(format!("reading {file}")))?;
    check(available.split_whitespace().any(|name| name == "tls"), || {
        format!("{file}: {available}")
    })?;
    let diagnosis =
        haul_bench::doctor::examine(None).map_err(|error| VmError::Guest(error.to_string()))?;
    let finding = diagnosis.settings.iter().find(|finding| finding.name.contains("TLS"));
    let Some(finding) = finding else {
        return Err(VmError::Guest("haul doctor has no finding about kTLS".into()));
    };
    println!("doctor: {}: {}", finding.name, finding.value);
    check(finding.verdict == haul_bench::doctor::Verdict::Good, || finding.why.clone())
}

/// A sender that has sent the command byte with which a connection begins. Sent by other code, the
/// byte would delay zero-copy until it is acknowledged.
fn new_sender<S: std::os::fd::AsFd>(connection: S, command: u8) -> Result<Sender<S>, VmError> {
    let mut sender = Sender::new(connection).map_err(failed)?;
    sender.send_all(&[command]).map_err(failed)?;
    Ok(sender)
}

fn new_pool(buffer_bytes: usize, buffers_max: usize) -> Result<BufferPool, VmError> {
    BufferPool::new(buffer_bytes, buffers_max).map_err(failed)
}

/// Lends the first bytes of the test stream and waits until they are returned; returns their
/// number. The completion shows the sender the kernel's numbers: later loans are not copied.
fn lend_first<S: std::os::fd::AsFd + Send + 'static>(
    sender: &mut Sender<S>,
) -> Result<u64, VmError> {
    let pool = new_pool(16 << 10, 1)?;
    let count = lend_next(sender, &pool, 0)?;
    let in_flight = sender.wait_for_completions(TIMEOUT).map_err(failed)?;
    sender.reclaim().map_err(failed)?.for_each(drop);
    check(in_flight == 0, || "the first loan was not returned".into())?;
    Ok(count)
}

/// Lends a buffer with the bytes of the test stream from `position` on; returns their number.
fn lend_next<S: std::os::fd::AsFd + Send + 'static>(
    sender: &mut Sender<S>,
    pool: &BufferPool,
    position: u64,
) -> Result<u64, VmError> {
    let mut buffer = pool.take().map_err(failed)?;
    buffer.resize(buffer.capacity()).map_err(failed)?;
    for (offset, byte) in buffer.iter_mut().enumerate() {
        *byte = byte_at(position + offset as u64);
    }
    let len = buffer.len() as u64;
    sender.lend(buffer).map_err(failed)?;
    Ok(len)
}

/// Overwrites all returned buffers and counts their outcomes.
fn reclaim_all(sender: &mut Sender<TcpStream>, outcomes: &mut Outcomes) -> Result<(), VmError> {
    for returned in sender.reclaim().map_err(failed)? {
        match returned.outcome {
            LoanOutcome::ZeroCopied => outcomes.zero_copied += 1,
            _ => outcomes.copied += 1,
        }
        if let Ok(mut buffer) = returned.buffer.into_owner::<PooledBuffer>() {
            buffer.fill(OVERWRITE_BYTE);
        }
    }
    Ok(())
}

/// Receives the number of bytes that arrived unchanged and checks that it equals `sent`.
fn expect_reply(from: &mut impl Read, sent: u64) -> Result<(), VmError> {
    let mut intact = [0; 8];
    from.read_exact(&mut intact).map_err(step("receiving the host's reply"))?;
    let intact = u64::from_le_bytes(intact);
    check(intact == sent, || format!("of {sent} bytes only the first {intact} arrived unchanged"))
}

/// Fails with `message` unless `is_right`.
fn check(is_right: bool, message: impl FnOnce() -> String) -> Result<(), VmError> {
    if is_right { Ok(()) } else { Err(VmError::Guest(message())) }
}

fn failed(error: impl std::fmt::Display) -> VmError {
    step("lending")(io::Error::other(error.to_string()))
}
