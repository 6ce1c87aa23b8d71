/* What two copies, one copy and no copy of a file's bytes cost the sender of a TCP connection.
 *
 * The same question as `haul bench copies`, without haul: this program shares no code with haul, so
 * each checks the other. It needs a C compiler, Linux 6.6 for the row of the copying sendfile, and
 * no privileges:
 *
 *     cc -O2 -o ladder ladder.c && ./ladder
 *     ./ladder 256M 64K        size of the file, bytes of a call
 *
 * One thread on one CPU sends a batch over loopback, and then reads the batch. Only the sending is
 * timed, per batch, by the monotonic clock. Of the batches of a round the lower quartile counts, so
 * that other programs on the machine matter little. The rows take turns within a round. Printed are
 * the median of the rounds in µs for each MiB, and the ratio to read+write in the same round, with
 * its smallest and largest value. "kept" is the share of sendfile's gain that a row keeps.
 *
 * Before the rounds each method sends sixteen pages. The file is then overwritten, and the pages
 * are read: a page with the new bytes was lent to the socket, and not copied.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PROOF_PAGES = 16, ROUNDS = 15, BATCH = 128 << 10, ROUND_BYTES = 24 << 20 };
enum row { READ_WRITE, MAPPED_WRITE, SENDFILE_COPIED, SENDFILE, SEND, ROWS };
static const char *const names[ROWS] = {"read+write", "mapped+write", "sendfile-copied", "sendfile",
                                        "send"};

static int file, direct, sender, receiver;
static size_t file_bytes;
static char *mapped, *buffer, *sink;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void connect_sockets(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), size = 4 << 20;
    /* BBR, the default of some hosts, would send by a timer. */
    setsockopt(listener, IPPROTO_TCP, 13 /* TCP_CONGESTION */, "reno", 4);
    setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&address, &length))
        fail("listening on loopback");
    sender = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(sender, IPPROTO_TCP, 13, "reno", 4);
    setsockopt(sender, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (connect(sender, (struct sockaddr *)&address, length)) fail("connecting on loopback");
    receiver = accept(listener, NULL, NULL);
    close(listener);
}

/* Sends at most `bytes` of the file from `offset`. Returns the number, or -1. */
static ssize_t send_some(enum row row, off_t offset, size_t bytes) {
    switch (row) {
    case READ_WRITE: {
        ssize_t read = pread(file, buffer, bytes, offset);
        return read <= 0 ? read : write(sender, buffer, read);
    }
    case MAPPED_WRITE:
        return write(sender, mapped + offset, bytes);
    case SENDFILE_COPIED:
        return sendfile(sender, direct, &offset, bytes);
    case SENDFILE:
        return sendfile(sender, file, &offset, bytes);
    default:
        return write(sender, buffer, bytes);
    }
}

static void receive(size_t bytes) {
    while (bytes > 0) {
        ssize_t got = recv(receiver, sink, bytes < BATCH ? bytes : BATCH, 0);
        if (got <= 0) fail("receiving");
        bytes -= got;
    }
}

/* The number of pages, of PROOF_PAGES, that were lent. -1 if the method is not possible. */
static int lent_pages(enum row row) {
    static char page[PROOF_PAGES * PAGE];
    memset(page, 'a', sizeof page);
    if (pwrite(file, page, sizeof page, 0) != sizeof page) fail("writing the file");
    for (size_t sent = 0; sent < sizeof page;) {
        ssize_t some = send_some(row, sent, sizeof page - sent);
        if (some <= 0) return -1;
        sent += some;
    }
    memset(page, 'b', sizeof page);
    if (pwrite(file, page, sizeof page, 0) != sizeof page) fail("writing the file");
    int lent = 0;
    for (size_t got = 0; got < sizeof page;) {
        ssize_t some = recv(receiver, page + got, sizeof page - got, 0);
        if (some <= 0) fail("receiving");
        got += some;
    }
    for (int i = 0; i < PROOF_PAGES; i++) lent += page[i * PAGE] == 'b';
    return lent;
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The lower quartile of the batches of a round, in µs for each MiB. */
static double round_cost(enum row row, size_t call) {
    static double costs[ROUND_BYTES / (64 << 10) + 1];
    static off_t offset;
    size_t batch = call > BATCH ? call : BATCH;
    int count = 0;
    for (size_t done = 0; done < ROUND_BYTES; done += batch) {
        double began = now_us();
        size_t sent = 0;
        while (sent < batch) {
            size_t bytes = batch - sent < call ? batch - sent : call;
            if (offset + bytes > file_bytes) offset = 0;
            ssize_t some = send_some(row, offset, bytes);
            if (some <= 0) fail(names[row]);
            sent += some;
            offset += some;
        }
        costs[count++] = (now_us() - began) * (1 << 20) / sent;
        receive(sent);
    }
    qsort(costs, count, sizeof *costs, ascending);
    return costs[count / 4];
}

static size_t parse(const char *text) {
    char *end;
    size_t number = strtoull(text, &end, 10);
    if (*end == 'K') number <<= 10;
    if (*end == 'M') number <<= 20;
    return number;
}

int main(int count, char **words) {
    file_bytes = count > 1 ? parse(words[1]) : 256 << 20;
    size_t call = count > 2 ? parse(words[2]) : 64 << 10;
    if (file_bytes < PROOF_PAGES * PAGE || call < 1 || call > file_bytes || call > 4 << 20) {
        fprintf(stderr, "usage: ladder [FILE [CALL]], such as ladder 256M 64K; the file has at "
                        "least 64K, and a call at most the file and 4M\n");
        return 2;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    char path[64];
    file = memfd_create("ladder", MFD_CLOEXEC);
    /* Whole pages, because a copy from or to the middle of a cache line is slower. */
    buffer = aligned_alloc(PAGE, (call / PAGE + 1) * PAGE);
    sink = aligned_alloc(PAGE, BATCH);
    if (buffer == NULL || sink == NULL) fail("allocating buffers");
    memset(buffer, 'x', call);
    for (size_t done = 0; done < file_bytes;) {
        size_t left = file_bytes - done;
        ssize_t some = write(file, buffer, left < call ? left : call);
        if (some <= 0) fail("filling the file");
        done += some;
    }
    mapped = mmap(NULL, file_bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
    if (mapped == MAP_FAILED) fail("mapping the file");
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    connect_sockets();

    int lent[ROWS];
    for (enum row row = 0; row < ROWS; row++)
        lent[row] = row == SENDFILE_COPIED && direct < 0 ? -1 : lent_pages(row);
    static double cost[ROWS][ROUNDS], ratio[ROWS][ROUNDS], kept[ROWS][ROUNDS];
    for (enum row row = 0; row < ROWS; row++)
        if (lent[row] >= 0) round_cost(row, call);
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < ROWS; turn++) {
            enum row row = (turn + round) % ROWS;
            if (lent[row] >= 0) cost[row][round] = round_cost(row, call);
        }
    printf("file of %zu KiB, calls of %zu KiB\n", file_bytes >> 10, call >> 10);
    printf("%-16s %10s %8s %24s %6s\n", "", "lent pages", "us/MiB", "x read+write", "kept");
    for (enum row row = 0; row < ROWS; row++) {
        if (lent[row] < 0) {
            printf("%-16s not on this kernel\n", names[row]);
            continue;
        }
        for (int round = 0; round < ROUNDS; round++) {
            double plain = cost[READ_WRITE][round], gain = plain - cost[SENDFILE][round];
            ratio[row][round] = cost[row][round] / plain;
            kept[row][round] = (plain - cost[row][round]) / gain;
        }
        double *sorted = ratio[row];
        qsort(sorted, ROUNDS, sizeof *sorted, ascending);
        qsort(kept[row], ROUNDS, sizeof(double), ascending);
        double costs[ROUNDS];
        memcpy(costs, cost[row], sizeof costs);
        qsort(costs, ROUNDS, sizeof *costs, ascending);
        printf("%-16s %7d/%d %8.0f %8.2f (%.2f to %.2f) ", names[row], lent[row], PROOF_PAGES,
               costs[ROUNDS / 2], sorted[ROUNDS / 2], sorted[0], sorted[ROUNDS - 1]);
        if (row == MAPPED_WRITE || row == SENDFILE_COPIED) printf("%6.2f", kept[row][ROUNDS / 2]);
        printf("\n");
    }
    return 0;
}
