//! What runs in the guest, as its first process: loans towards the host, and the library's own tests.

use super::peer::{GO, READ_LATER, READ_NOW, byte_at};
use super::{FAILED, GUEST, HOST, MODULES_IN_ORDER, PASSED, TESTS, VmError, step};
use haul::{Buffer, Outcome, Pool, SendReport, Sender};
use rustix::mount::MountFlags;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, UdpSocket};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Names the peer's port: a word of the kernel's command line, which the first process gets as its environment.
pub(super) const PEER: &str = "HAUL_VM_PEER";
const PATIENCE: Duration = Duration::from_secs(60);
/// A buffer that came back is written over with this: whoever still reads it shows it to the peer.
const WRITTEN_OVER: u8 = 0xEE;

/// Runs the guest if this is a guest's first process, which does not return.
pub fn run_if_first_process() -> Option<ExitCode> {
    // A container's first process is no guest's.
    let port = std::env::var(PEER).ok().filter(|_| std::process::id() == 1)?.parse();
    let port = port.map_err(|_| VmError::Guest(format!("{PEER} is no port")));
    match port.and_then(|port| prepare().and_then(|()| run(port))) {
        Ok(()) => println!("{PASSED}"),
        Err(error) => println!("{FAILED}: {error}"),
    }
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    Some(ExitCode::FAILURE)
}

/// Mounts, modules, the network.
fn prepare() -> Result<(), VmError> {
    for (kind, folder) in
        [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp")]
    {
        rustix::mount::mount(kind, folder, kind, MountFlags::empty(), None)
            .map_err(|errno| step(format!("mounting {folder}"))(errno.into()))?;
    }
    let modules = fs::read_to_string(format!("/{MODULES_IN_ORDER}"))
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

fn run(port: u16) -> Result<(), VmError> {
    let kernel = rustix::system::uname();
    println!("haul guest: Linux {}", kernel.release().to_string_lossy());
    for buffer_bytes in [4096, 16 << 10, 64 << 10, 1 << 20] {
        let (report, outcomes) = lend(port, 8 << 20, buffer_bytes)?;
        let copied = outcomes.copied;
        println!(
            "loans of {buffer_bytes} bytes to the host: {} without a copy, {copied} copied; {} bytes arrived as lent",
            outcomes.zero_copied, report.loans.bytes
        );
        check(copied == 0 && report.fallbacks.is_empty(), || {
            format!("loans were copied: {report:?}")
        })?;
    }
    held_loans(port)?;
    dropped_sender(port)?;
    datagrams(port)?;
    for trouble in
        ["loss 2%", "delay 2ms reorder 25% 50%", "duplicate 5%", "delay 1ms loss 1% reorder 20%"]
    {
        let words: Vec<&str> = ["qdisc", "replace", "dev", "eth0", "root", "netem"]
            .into_iter()
            .chain(trouble.split(' '))
            .collect();
        call("tc", &words)?;
        let (report, outcomes) = lend(port, 4 << 20, 64 << 10)?;
        println!(
            "netem {trouble}: {} loans without a copy, {} copied; {} bytes arrived as lent",
            outcomes.zero_copied, outcomes.copied, report.loans.bytes
        );
    }
    call("tc", &["qdisc", "delete", "dev", "eth0", "root"])?;
    kernel_tls()?;
    for (package, file, filter) in TESTS {
        let started = Instant::now();
        let output = Command::new(format!("/tests/{file}"))
            .arg(filter)
            .env("HAUL_TEST_MIB", "2")
            .stderr(Stdio::inherit())
            .output()
            .map_err(step(format!("running the tests of {package}, {file}")))?;
        let said = String::from_utf8_lossy(&output.stdout);
        println!("{said}");
        // A name that fits no test is none that passes.
        let is_passed = output.status.success() && !said.contains(" 0 passed");
        check(is_passed, || format!("the tests of {package}, {file} {filter}, fail in the guest"))?;
        println!("the tests of {package}, {file} {filter}, pass here ({:.0?})", started.elapsed());
    }
    Ok(())
}

#[derive(Default)]
struct Outcomes {
    zero_copied: usize,
    copied: usize,
}

fn connect(port: u16, command: u8) -> Result<TcpStream, VmError> {
    let mut connection =
        TcpStream::connect((HOST, port)).map_err(step("connecting to the host"))?;
    connection.write_all(&[command]).map_err(step("beginning a connection"))?;
    Ok(connection)
}

/// Lends the whole stream from buffers that are written over as soon as they are back.
fn lend(port: u16, total: u64, buffer_bytes: usize) -> Result<(SendReport, Outcomes), VmError> {
    let connection = connect(port, READ_NOW)?;
    let mut answers = connection.try_clone().map_err(step("cloning a socket"))?;
    let mut sender = sender(connection)?;
    let pool = pool(buffer_bytes, 65)?;
    let mut outcomes = Outcomes::default();
    let mut position = 0;
    while position < total {
        position += lend_next(&mut sender, &pool, position)?;
        take_back(&mut sender, &mut outcomes)?;
    }
    let held = sender.settle(PATIENCE).map_err(wrong)?;
    take_back(&mut sender, &mut outcomes)?;
    check(held == 0 && pool.out() == 0, || format!("{} buffers never came back", pool.out()))?;
    answers.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_answer(&mut answers, total)?;
    Ok((sender.report(), outcomes))
}

/// While the peer does not read, what it has no room for stays out; what comes back is written over, and the
/// peer sees nothing of that.
fn held_loans(port: u16) -> Result<(), VmError> {
    let connection = connect(port, READ_LATER)?;
    connection.set_nonblocking(true).map_err(step("setting O_NONBLOCK"))?;
    let mut answers = connection.try_clone().map_err(step("cloning a socket"))?;
    let mut sender = sender(connection)?;
    let pool = pool(256 << 10, 64)?;
    let mut outcomes = Outcomes::default();
    let mut position = 0;
    while let Ok(count) = lend_next(&mut sender, &pool, position) {
        position += count;
        take_back(&mut sender, &mut outcomes)?;
    }
    thread::sleep(Duration::from_millis(500));
    take_back(&mut sender, &mut outcomes)?;
    let out = sender.report().loans_out;
    check(out > 0, || "the kernel let go of everything although nobody has read".into())?;
    connect(port, GO)?;
    let deadline = Instant::now() + PATIENCE;
    while sender.flush().is_err() || sender.settle(Duration::from_millis(10)).map_err(wrong)? > 0 {
        check(Instant::now() < deadline, || {
            format!("loans never came back: {:?}", sender.report())
        })?;
        take_back(&mut sender, &mut outcomes)?;
    }
    take_back(&mut sender, &mut outcomes)?;
    answers.set_nonblocking(false).map_err(step("setting the mode"))?;
    answers.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_answer(&mut answers, position)?;
    println!(
        "a peer that did not read: {out} loans stayed out, and came back when it did; {position} bytes as lent"
    );
    check(outcomes.copied == 0 && pool.out() == 0, || format!("{:?}", sender.report()))
}

/// A sender that goes leaves its loans with the kernel until the peer has read them.
fn dropped_sender(port: u16) -> Result<(), VmError> {
    let connection = Arc::new(connect(port, READ_LATER)?);
    connection.set_nonblocking(true).map_err(step("setting O_NONBLOCK"))?;
    let mut sender = Sender::new(Arc::clone(&connection)).map_err(wrong)?;
    let pool = pool(128 << 10, 128)?;
    let mut position = 0;
    while let Ok(count) = lend_next(&mut sender, &pool, position) {
        position += count;
    }
    // What a socket has taken of the last loan is all that will be sent of it.
    let sent = sender.report().loans.bytes;
    sender.reclaim().map_err(wrong)?.for_each(drop);
    let out = pool.out();
    drop(sender);
    check(out > 0 && pool.out() > 0, || "nothing was out when the sender went".into())?;
    connect(port, GO)?;
    let deadline = Instant::now() + PATIENCE;
    while pool.out() > 0 {
        check(Instant::now() < deadline, || format!("{} buffers never came back", pool.out()))?;
        thread::sleep(Duration::from_millis(5));
    }
    connection.set_nonblocking(false).map_err(step("setting the mode"))?;
    connection.shutdown(Shutdown::Write).map_err(step("ending the stream"))?;
    expect_answer(&mut &*connection, sent)?;
    println!(
        "a sender dropped with {out} buffers out: all came back once the peer had read; {sent} bytes as lent"
    );
    Ok(())
}

fn datagrams(port: u16) -> Result<(), VmError> {
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(step("making a datagram socket"))?;
    socket.connect((HOST, port)).map_err(step("connecting a datagram socket"))?;
    let mut sender = Sender::new(socket).map_err(wrong)?;
    let pool = pool(64 << 10, 2)?;
    let mut buffer = pool.take().map_err(wrong)?;
    buffer.set_len(40 * 1472);
    sender.lend_segments(buffer, 1472).map_err(wrong)?;
    let held = sender.settle(PATIENCE).map_err(wrong)?;
    let back: Vec<Outcome> = sender.reclaim().map_err(wrong)?.map(|back| back.outcome).collect();
    println!("40 datagrams in one loan: {back:?}");
    check(held == 0 && back == [Outcome::ZeroCopied], || format!("{:?}", sender.report()))?;
    // A segment that no packet carries fails after the kernel has counted it: the loans around it all come back.
    sender.lend_segments(vec![0; 40 * 1472], 1472).map_err(wrong)?;
    let refused = sender.lend_segments(vec![1; 20_000], 5000);
    check(refused.is_err(), || "a segment larger than the MTU was taken".into())?;
    for _ in 0..5 {
        sender.lend_segments(vec![2; 40 * 1472], 1472).map_err(wrong)?;
    }
    let held = sender.settle(PATIENCE).map_err(wrong)?;
    let back: Vec<Outcome> = sender.reclaim().map_err(wrong)?.map(|back| back.outcome).collect();
    println!("datagrams around one that failed: {back:?}");
    check(held == 0 && back.len() == 6, || format!("{:?}", sender.report()))
}

/// kTLS is there: by the kernel's word, and by installing it.
fn kernel_tls() -> Result<(), VmError> {
    let file = "/proc/sys/net/ipv4/tcp_available_ulp";
    let available = fs::read_to_string(file).map_err(step(format!("reading {file}")))?;
    check(available.split_whitespace().any(|name| name == "tls"), || {
        format!("{file}: {available}")
    })?;
    let diagnosis =
        haul_bench::doctor::examine(None).map_err(|error| VmError::Guest(error.to_string()))?;
    let finding = diagnosis.settings.iter().find(|finding| finding.name.contains("TLS"));
    let Some(finding) = finding else {
        return Err(VmError::Guest("the doctor does not look for kTLS".into()));
    };
    println!("doctor: {}: {}", finding.name, finding.value);
    check(finding.verdict == haul_bench::doctor::Verdict::Good, || finding.why.clone())
}

fn sender(connection: TcpStream) -> Result<Sender<TcpStream>, VmError> {
    Sender::new(connection).map_err(wrong)
}

fn pool(buffer_bytes: usize, buffers_max: usize) -> Result<Pool, VmError> {
    Pool::new(buffer_bytes, buffers_max).map_err(wrong)
}

/// Fills a buffer with what the stream has next and lends it; how much that was.
fn lend_next<S: std::os::fd::AsFd + Send + 'static>(
    sender: &mut Sender<S>,
    pool: &Pool,
    position: u64,
) -> Result<u64, VmError> {
    let mut buffer = pool.take().map_err(wrong)?;
    for (offset, byte) in buffer.iter_mut().enumerate() {
        *byte = byte_at(position + offset as u64);
    }
    let len = buffer.len() as u64;
    sender.lend(buffer).map_err(wrong)?;
    Ok(len)
}

fn take_back(sender: &mut Sender<TcpStream>, outcomes: &mut Outcomes) -> Result<(), VmError> {
    for mut back in sender.reclaim().map_err(wrong)? {
        match back.outcome {
            Outcome::ZeroCopied => outcomes.zero_copied += 1,
            Outcome::Copied => outcomes.copied += 1,
        }
        if let Buffer::Pooled(buffer) = &mut back.buffer {
            buffer.fill(WRITTEN_OVER);
        }
    }
    Ok(())
}

fn expect_answer(from: &mut impl Read, sent: u64) -> Result<(), VmError> {
    let mut right = [0; 8];
    from.read_exact(&mut right).map_err(step("hearing what arrived"))?;
    let right = u64::from_le_bytes(right);
    check(right == sent, || format!("of {sent} bytes the first {right} arrived as they were lent"))
}

fn call(program: &str, arguments: &[&str]) -> Result<(), VmError> {
    let status = Command::new(format!("/bin/{program}"))
        .args(arguments)
        .status()
        .map_err(step(format!("running {program}")))?;
    check(status.success(), || format!("{program} {} failed", arguments.join(" ")))
}

fn check(is_right: bool, otherwise: impl FnOnce() -> String) -> Result<(), VmError> {
    if is_right { Ok(()) } else { Err(VmError::Guest(otherwise())) }
}

fn wrong(error: impl std::fmt::Display) -> VmError {
    step("lending")(io::Error::other(error.to_string()))
}
