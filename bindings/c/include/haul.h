/* haul: send, receive and forward bytes over TCP on Linux by the cheapest method.
 *
 * Every function that can fail returns -1 and sets errno, as the calls of the kernel do:
 *
 *   EAGAIN       the socket is not ready: poll for haul_sender_wants(), or for POLLIN
 *   ENOBUFS      the limits of the loans are reached (HAUL_LOAN_LIMIT): haul_reclaim() first
 *   ENODATA      the file ends before the range does
 *   ESTALE       the stream lacks the rest of a loan: close it
 *   EOWNERDEAD   the handle belongs to the parent of this forked process
 *   EPROTOTYPE   the socket is of another kind than the call needs
 *   EINVAL       an argument is invalid
 *   EOPNOTSUPP   the method does not support the file or the socket
 *   ENOTRECOVERABLE  a bug of haul: the handle must not be used any more
 *
 * and the kernel's numbers otherwise. haul_error() has a message for people, and haul_error_code()
 * the stable number of the error.
 *
 * A handle may be used by one thread at a time, and by different threads in turn. No call raises
 * SIGPIPE, and a thread is not cancelled inside a call. A forked child must not use or free the
 * handles of its parent.
 */
#ifndef HAUL_H
#define HAUL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct haul_sender haul_sender;
typedef struct haul_receiver haul_receiver;
typedef struct haul_forwarder haul_forwarder;

/* The stable numbers of errors. A later version may add numbers. */
enum {
	HAUL_REFUSED = 1,         /* the kernel refuses a call */
	HAUL_UNSUPPORTED = 2,     /* the method does not support the file or the socket */
	HAUL_INVALID_INPUT = 3,   /* an argument is invalid */
	HAUL_NOT_A_SOCKET = 4,    /* the descriptor is not a socket */
	HAUL_WRONG_SOCKET = 5,    /* the socket is of another kind than the call needs */
	HAUL_ENDED = 6,           /* the file ends before the range does */
	HAUL_WOULD_BLOCK = 7,     /* the socket is not ready */
	HAUL_TIMED_OUT = 8,       /* a time limit was reached */
	HAUL_LOAN_LIMIT = 9,      /* the limits of the loans are reached: haul_reclaim() first */
	HAUL_LOAN_EMPTY = 10,     /* an empty buffer cannot be lent */
	HAUL_LOAN_TOO_LARGE = 11, /* the loan is larger than loan_bytes_max: lend parts */
	HAUL_STREAM_TORN = 12,    /* the stream lacks the rest of a loan: close it */
	HAUL_FORKED = 13,         /* the handle belongs to the parent process */
	HAUL_POOL_EMPTY = 14,     /* all buffers of a pool are in use */
	HAUL_FAILED = 15          /* a call failed for another reason */
};

/* The number of the calling thread's latest error, 0 without an error. */
int haul_error_code(void);
/* The message of the calling thread's latest error, valid until the thread's next call of haul. */
const char *haul_error(void);

/* ---- Sending ---- */

/* Settings of a sender. Call haul_settings_init() first, which sets the defaults. */
typedef struct haul_settings {
	size_t size;           /* sizeof(haul_settings) of the program */
	size_t loans_max;      /* outstanding loans: 64 */
	size_t loan_bytes_max; /* bytes of all loans together: 16 MiB */
	const char *method;    /* a send method, such as "sendfile"; NULL: the cheapest */
} haul_settings;

void haul_settings_init_sized(haul_settings *settings, size_t size);
#define haul_settings_init(settings) haul_settings_init_sized((settings), sizeof(haul_settings))

/* Creates a sender of a connected socket. The sender has a duplicate of the descriptor, and the
 * program keeps its own. settings may be NULL.
 *
 * A socket should have one sender at a time, because the kernel reports the end of a loan once for
 * each socket. A second sender in the process copies what it lends. Two processes must not lend on
 * the same socket. A program that lends must not read the error queue of the socket or send with
 * MSG_ZEROCOPY itself. */
int haul_sender_new(int socket, const haul_settings *settings, haul_sender **sender);

/* With HAUL_MORE, the bytes wait for those that follow, to share packets with them. */
#define HAUL_MORE 1

/* Send some bytes, and return their number. haul_sendv() sends at most 1024 parts. */
ssize_t haul_send(haul_sender *sender, const void *data, size_t length, int flags);
ssize_t haul_sendv(haul_sender *sender, const struct iovec *parts, int count, int flags);
/* Sends a part of a range of a file, and returns the number of bytes; 0 only for length 0. */
ssize_t haul_send_file(haul_sender *sender, int file, uint64_t offset, size_t length);

/* How the bytes of a loan were sent. */
#define HAUL_ZERO_COPIED 0 /* the kernel sent from the memory itself */
#define HAUL_COPIED 1      /* some or all bytes were copied */
#define HAUL_ABANDONED 2   /* the sender was freed; the memory is not used any more */

/* Called once for each loan that haul_lend() took, when the kernel released the memory: by
 * haul_reclaim() and haul_sender_free() on the calling thread, or by a thread of haul after
 * haul_sender_free(). Data and context must stay until this call. If the process ends first, or if
 * haul can neither wait for the kernel nor start a thread, the function is not called, and the
 * memory must stay for ever.
 *
 * The function must return normally: no longjmp, no exception of C++. With HAUL_ABANDONED,
 * sent_bytes is 0, because the number is not known, and the sender must not be used. */
typedef void (*haul_release)(void *context, const void *data, size_t sent_bytes, int outcome);

/* Lends memory to the kernel, which sends the memory itself and not a copy. Returns the number of
 * the loan. The memory must not change until release is called. If haul_lend() fails, release is
 * never called. */
int64_t haul_lend(haul_sender *sender, const void *data, size_t length, haul_release release,
                  void *context);
/* Calls the release function of each loan that ended. Returns their number. */
int haul_reclaim(haul_sender *sender);
/* Sends the rest of a loan that a non-blocking socket accepted in part. */
int haul_flush(haul_sender *sender);
/* The events to poll the socket for: POLLOUT, POLLERR, both or 0; -1 if sender is NULL. */
short haul_sender_wants(const haul_sender *sender);
/* Handles POLLERR: reads the completions, and then fails with the error of the socket, if any. The
 * kernel reports an error once, so haul_receive() returns 0 after that. */
int haul_on_error_event(haul_sender *sender);
/* Waits until the kernel released all loans, at most timeout_ms (-1: no limit). Returns the number
 * of sends that are still in flight. */
int haul_wait_for_completions(haul_sender *sender, int timeout_ms);

#define HAUL_LEAVE 0 /* the connection goes on */
#define HAUL_ABORT 1 /* the connection is reset, which releases loans soon */
/* Frees a sender. NULL is ignored. A thread of haul keeps the loans that the kernel still uses, and
 * resets the connection if the peer takes none of the bytes for two minutes. Free the sender before
 * you close a socket that has loans. With HAUL_ABORT, the program closes its
 * own descriptor at once, because some sockets are reset by the last close. */
void haul_sender_free(haul_sender *sender, int how);

/* ---- Receiving ---- */

int haul_receiver_new(int socket, haul_receiver **receiver);
/* Receive some bytes, and return their number; 0 at the end of the stream, and for length 0. */
ssize_t haul_receive(haul_receiver *receiver, void *data, size_t length);
ssize_t haul_receive_file(haul_receiver *receiver, int file, uint64_t offset, size_t length);
ssize_t haul_discard(haul_receiver *receiver, size_t length);
/* Bytes that the receiver took from the socket and did not write to the file, because the disk was
 * full, for example. If there are some, do not poll: call haul_receive_file() or haul_receive(). */
ssize_t haul_receiver_held_bytes(haul_receiver *receiver);
void haul_receiver_free(haul_receiver *receiver);

/* ---- Forwarding ---- */

#define HAUL_DONE 0  /* both streams ended */
#define HAUL_WAIT 1  /* poll both sockets for their events, even for 0 */
#define HAUL_YIELD 2 /* call again: there may be more to do */

/* Joins two connected, non-blocking sockets. */
int haul_forwarder_new(int a, int b, haul_forwarder **forwarder);
/* Moves what can be moved. events has the events of poll() for a and b: those that arrived (POLLIN |
 * POLLOUT at first), and after HAUL_WAIT those to wait for. A socket whose events are 0 is polled,
 * too, so that its failure is noticed; after its first POLLHUP or POLLERR, leave out the socket,
 * until its events are not 0. */
int haul_forwarder_step(haul_forwarder *forwarder, short events[2]);
/* Frees a forwarder. Unless the latest step returned HAUL_DONE, both TCP connections are reset, so
 * that no peer takes a truncated stream for a whole one. */
void haul_forwarder_free(haul_forwarder *forwarder);

#ifdef __cplusplus
}
#endif
#endif
