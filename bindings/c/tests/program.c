/* Uses every function of haul.h over loopback. Exits with 0, or aborts at the line that failed. */
#define _POSIX_C_SOURCE 200809L

#include "haul.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                      \
	do {                                                                                   \
		if (!(condition)) {                                                            \
			fprintf(stderr, "line %d: %s (errno %d, haul %d: %s)\n", __LINE__,     \
				#condition, errno, haul_error_code(), haul_error());           \
			abort();                                                               \
		}                                                                              \
	} while (0)

#define LENGTH ((size_t)4 << 20)

/* Bytes that depend on their position. */
static unsigned char *pattern(size_t length)
{
	unsigned char *bytes = (unsigned char *)malloc(length);
	size_t i;
	CHECK(bytes != NULL);
	for (i = 0; i < length; i++)
		bytes[i] = (unsigned char)(i * 131 + (i >> 8) * 17);
	return bytes;
}

static void connect_pair(int pair[2])
{
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	memset(&address, 0, sizeof(address));
	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK(bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0);
	CHECK(listen(listener, 1) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
	pair[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(pair[0], (struct sockaddr *)&address, sizeof(address)) == 0);
	pair[1] = accept(listener, NULL, NULL);
	CHECK(pair[1] >= 0);
	close(listener);
}

struct received {
	int socket;
	unsigned char *bytes;
	size_t length, room;
};

/* Reads a socket to its end. */
static void *receive_all(void *argument)
{
	struct received *received = (struct received *)argument;
	for (;;) {
		ssize_t count = read(received->socket, received->bytes + received->length,
				     received->room - received->length);
		CHECK(count >= 0);
		if (count == 0)
			return NULL;
		received->length += (size_t)count;
		CHECK(received->length < received->room);
	}
}

static pthread_t start_receiving(struct received *received, int socket, size_t room)
{
	pthread_t thread;
	received->socket = socket;
	received->bytes = (unsigned char *)malloc(room);
	received->length = 0;
	received->room = room;
	CHECK(pthread_create(&thread, NULL, receive_all, received) == 0);
	return thread;
}

static void bytes_and_files(void)
{
	int pair[2];
	unsigned char *bytes = pattern(LENGTH);
	struct received received;
	struct iovec parts[2];
	haul_sender *sender = NULL;
	haul_settings settings;
	pthread_t thread;
	FILE *file = tmpfile();
	size_t sent = 0;
	CHECK(file != NULL && fwrite(bytes, 1, LENGTH, file) == LENGTH && fflush(file) == 0);
	connect_pair(pair);
	thread = start_receiving(&received, pair[1], 2 * LENGTH);
	haul_settings_init(&settings);
	settings.method = "sendfile";
	CHECK(haul_sender_new(pair[0], &settings, &sender) == 0);
	CHECK(haul_send(sender, "head", 4, HAUL_MORE) == 4);
	while (sent < LENGTH - 10) {
		ssize_t count = haul_send_file(sender, fileno(file), 10 + sent, LENGTH - 10 - sent);
		CHECK(count > 0);
		sent += (size_t)count;
	}
	parts[0].iov_base = (void *)"ta";
	parts[0].iov_len = 2;
	parts[1].iov_base = (void *)"il";
	parts[1].iov_len = 2;
	CHECK(haul_sendv(sender, parts, 2, 0) == 4);
	/* The file ends before the range. */
	CHECK(haul_send_file(sender, fileno(file), LENGTH + 5, 1) == -1 && errno == ENODATA);
	CHECK(haul_error_code() == 6 && strstr(haul_error(), "ends at byte") != NULL);
	haul_sender_free(sender, HAUL_LEAVE);
	close(pair[0]);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(received.length == LENGTH - 2);
	CHECK(memcmp(received.bytes, "head", 4) == 0);
	CHECK(memcmp(received.bytes + 4, bytes + 10, LENGTH - 10) == 0);
	CHECK(memcmp(received.bytes + LENGTH - 6, "tail", 4) == 0);
	close(pair[1]);
	fclose(file);
	free(received.bytes);
	free(bytes);
}

struct loan {
	int calls, outcome;
	size_t sent;
	const void *data;
	pthread_mutex_t lock;
};

static void release(void *context, const void *data, size_t sent, int outcome)
{
	struct loan *loan = (struct loan *)context;
	CHECK(pthread_mutex_lock(&loan->lock) == 0);
	loan->calls++;
	loan->data = data;
	loan->sent = sent;
	loan->outcome = outcome;
	CHECK(pthread_mutex_unlock(&loan->lock) == 0);
}

static int calls_of(struct loan *loan)
{
	int calls;
	CHECK(pthread_mutex_lock(&loan->lock) == 0);
	calls = loan->calls;
	CHECK(pthread_mutex_unlock(&loan->lock) == 0);
	return calls;
}

static void loans(void)
{
	int pair[2], i;
	unsigned char *bytes = pattern(LENGTH);
	struct loan all[3], refused;
	const struct timespec pause = {0, 10000000};
	struct received received;
	haul_sender *sender = NULL;
	pthread_t thread;
	memset(all, 0, sizeof(all));
	memset(&refused, 0, sizeof(refused));
	pthread_mutex_init(&refused.lock, NULL);
	connect_pair(pair);
	thread = start_receiving(&received, pair[1], 4 * LENGTH);
	CHECK(haul_sender_new(pair[0], NULL, &sender) == 0);
	CHECK(haul_lend(sender, bytes, 0, release, &refused) == -1 && errno == EINVAL);
	CHECK(haul_lend(sender, NULL, 5, release, &refused) == -1 && errno == EINVAL);
	CHECK(calls_of(&refused) == 0);
	for (i = 0; i < 3; i++) {
		pthread_mutex_init(&all[i].lock, NULL);
		CHECK(haul_lend(sender, bytes, LENGTH, release, &all[i]) == i);
	}
	CHECK(haul_flush(sender) == 0);
	CHECK(haul_wait_for_completions(sender, 120000) == 0);
	CHECK((haul_sender_wants(sender) & POLLOUT) == 0);
	CHECK(haul_reclaim(sender) == 3 && haul_reclaim(sender) == 0);
	for (i = 0; i < 3; i++) {
		CHECK(all[i].calls == 1 && all[i].sent == LENGTH && all[i].data == bytes);
		CHECK(all[i].outcome == HAUL_ZERO_COPIED || all[i].outcome == HAUL_COPIED);
	}
	/* A sender that is freed with a loan gives the memory back once, now or later. */
	CHECK(haul_lend(sender, bytes, 100000, release, &all[0]) == 3);
	haul_sender_free(sender, HAUL_LEAVE);
	close(pair[0]);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(received.length == 3 * LENGTH + 100000);
	for (i = 0; i < 12000 && calls_of(&all[0]) < 2; i++)
		nanosleep(&pause, NULL);
	CHECK(calls_of(&all[0]) == 2 && all[0].outcome == HAUL_ABANDONED);
	close(pair[1]);
	free(received.bytes);
	free(bytes);
}

/* A connection that the peer reset raises no SIGPIPE. */
static void resets(const char *method)
{
	haul_settings settings;
	int pair[2];
	char byte = 0;
	struct linger linger;
	haul_sender *sender = NULL;
	FILE *file = tmpfile();
	unsigned char *bytes = pattern(LENGTH);
	CHECK(file != NULL && fwrite(bytes, 1, LENGTH, file) == LENGTH && fflush(file) == 0);
	signal(SIGPIPE, SIG_DFL);
	connect_pair(pair);
	linger.l_onoff = 1;
	linger.l_linger = 0;
	CHECK(setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)) == 0);
	haul_settings_init(&settings);
	settings.method = method;
	CHECK(haul_sender_new(pair[0], &settings, &sender) == 0);
	close(pair[1]);
	while (haul_send_file(sender, fileno(file), 0, LENGTH) > 0) {
	}
	CHECK(errno == EPIPE || errno == ECONNRESET);
	CHECK(haul_send_file(sender, fileno(file), 0, LENGTH) == -1 && errno == EPIPE);
	CHECK(haul_send(sender, &byte, 1, 0) == -1 && errno == EPIPE);
	haul_sender_free(sender, HAUL_ABORT);
	close(pair[0]);
	fclose(file);
	free(bytes);
}

/* A SIGPIPE that is pending before a call is pending after the call. */
static void pending_signals(void)
{
	int pair[2];
	sigset_t pipe_signal, pending;
	haul_sender *sender = NULL;
	int taken;
	CHECK(sigemptyset(&pipe_signal) == 0 && sigaddset(&pipe_signal, SIGPIPE) == 0);
	CHECK(pthread_sigmask(SIG_BLOCK, &pipe_signal, NULL) == 0 && raise(SIGPIPE) == 0);
	connect_pair(pair);
	CHECK(haul_sender_new(pair[0], NULL, &sender) == 0);
	CHECK(haul_send(sender, "x", 1, 0) == 1);
	CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1);
	CHECK(sigwait(&pipe_signal, &taken) == 0 && taken == SIGPIPE);
	CHECK(pthread_sigmask(SIG_UNBLOCK, &pipe_signal, NULL) == 0);
	haul_sender_free(sender, HAUL_LEAVE);
	close(pair[0]);
	close(pair[1]);
}

static void *write_all(void *argument)
{
	struct received *data = (struct received *)argument;
	size_t written = 0;
	while (written < data->length) {
		ssize_t count = write(data->socket, data->bytes + written, data->length - written);
		CHECK(count > 0);
		written += (size_t)count;
	}
	CHECK(shutdown(data->socket, SHUT_WR) == 0);
	return NULL;
}

static void receiving(void)
{
	int pair[2];
	unsigned char *bytes = pattern(LENGTH), *copy = (unsigned char *)malloc(LENGTH);
	struct received data;
	haul_receiver *receiver = NULL;
	FILE *file = tmpfile();
	pthread_t thread;
	size_t position = 0;
	connect_pair(pair);
	data.socket = pair[0];
	data.bytes = bytes;
	data.length = LENGTH;
	CHECK(pthread_create(&thread, NULL, write_all, &data) == 0);
	CHECK(haul_receiver_new(pair[1], &receiver) == 0);
	while (position < 1000) {
		ssize_t count = haul_discard(receiver, 1000 - position);
		CHECK(count > 0);
		position += (size_t)count;
	}
	while (position < 200000) {
		ssize_t count = haul_receive(receiver, copy + position, 200000 - position);
		CHECK(count > 0);
		position += (size_t)count;
	}
	for (;;) {
		ssize_t count =
			haul_receive_file(receiver, fileno(file), position, LENGTH + 1 - position);
		CHECK(count >= 0);
		if (count == 0)
			break;
		position += (size_t)count;
	}
	CHECK(haul_receiver_held_bytes(receiver) == 0);
	CHECK(position == LENGTH && haul_receive(receiver, copy, 1) == 0);
	CHECK(pread(fileno(file), copy + 200000, LENGTH - 200000, 200000) ==
	      (ssize_t)(LENGTH - 200000));
	CHECK(memcmp(copy + 1000, bytes + 1000, LENGTH - 1000) == 0);
	haul_receiver_free(receiver);
	CHECK(pthread_join(thread, NULL) == 0);
	close(pair[0]);
	close(pair[1]);
	fclose(file);
	free(copy);
	free(bytes);
}

static void forwarding(void)
{
	int client[2], server[2], result;
	short events[2] = {POLLIN | POLLOUT, POLLIN | POLLOUT};
	struct received sent, received, answer;
	haul_forwarder *forwarder = NULL;
	pthread_t writing, reading, answering;
	connect_pair(client);
	connect_pair(server);
	sent.socket = client[0];
	sent.bytes = pattern(LENGTH);
	sent.length = LENGTH;
	CHECK(pthread_create(&writing, NULL, write_all, &sent) == 0);
	reading = start_receiving(&received, server[1], LENGTH + 1);
	answering = start_receiving(&answer, client[0], 10);
	CHECK(shutdown(server[1], SHUT_WR) == 0);
	/* A blocking socket would stop both directions. */
	CHECK(haul_forwarder_new(client[1], server[0], &forwarder) == 0);
	CHECK(haul_forwarder_step(forwarder, events) == -1 && errno == EINVAL);
	CHECK(fcntl(client[1], F_SETFL, O_NONBLOCK) == 0);
	CHECK(fcntl(server[0], F_SETFL, O_NONBLOCK) == 0);
	while ((result = haul_forwarder_step(forwarder, events)) != HAUL_DONE) {
		CHECK(result == HAUL_WAIT || result == HAUL_YIELD);
		if (result == HAUL_WAIT) {
			struct pollfd polled[2];
			polled[0].fd = client[1];
			polled[1].fd = server[0];
			polled[0].events = events[0];
			polled[1].events = events[1];
			CHECK(poll(polled, 2, 120000) > 0);
			events[0] = polled[0].revents;
			events[1] = polled[1].revents;
		}
	}
	haul_forwarder_free(forwarder);
	close(client[1]);
	close(server[0]);
	CHECK(pthread_join(writing, NULL) == 0 && pthread_join(reading, NULL) == 0);
	CHECK(pthread_join(answering, NULL) == 0 && answer.length == 0);
	CHECK(received.length == LENGTH && memcmp(received.bytes, sent.bytes, LENGTH) == 0);
	close(client[0]);
	close(server[1]);
	free(received.bytes);
	free(answer.bytes);
	free(sent.bytes);
}

static void errors(void)
{
	int pair[2], status, i;
	const struct timespec pause = {0, 10000000};
	haul_sender *sender = NULL;
	haul_settings settings;
	pid_t child;
	memset(&settings, 0, sizeof(settings));
	connect_pair(pair);
	CHECK(haul_sender_new(pair[0], &settings, &sender) == -1 && errno == EINVAL);
	haul_settings_init(&settings);
	settings.method = "no such method";
	CHECK(haul_sender_new(pair[0], &settings, &sender) == -1 && errno == EINVAL);
	CHECK(sender == NULL);
	CHECK(haul_sender_new(-1, NULL, &sender) == -1 && errno == EINVAL);
	CHECK(haul_sender_new(9999, NULL, &sender) == -1 && errno == EBADF);
	CHECK(haul_sender_new(fileno(stderr), NULL, &sender) == -1 && errno == ENOTSOCK);
	CHECK(haul_sender_new(pair[0], NULL, NULL) == -1 && errno == EINVAL);
	CHECK(haul_send(NULL, "x", 1, 0) == -1 && errno == EINVAL);
	CHECK(haul_sender_new(pair[0], NULL, &sender) == 0);
	CHECK(haul_send(sender, NULL, 1, 0) == -1 && errno == EINVAL);
	CHECK(haul_send(sender, "x", 1, 64) == -1 && errno == EINVAL);
	CHECK(haul_send_file(sender, -1, 0, 1) == -1 && errno == EINVAL);
	CHECK(haul_send_file(sender, 9999, 0, 1) == -1 && errno == EBADF);
	haul_sender_free(NULL, HAUL_LEAVE);
	haul_receiver_free(NULL);
	haul_forwarder_free(NULL);
	/* A forked child must not use the loans of its parent. */
	{
		static struct loan loan;
		static const char bytes[100000] = {0};
		pthread_mutex_init(&loan.lock, NULL);
		CHECK(haul_lend(sender, bytes, sizeof(bytes), release, &loan) == 0);
		child = fork();
		if (child == 0)
			_exit(haul_reclaim(sender) == -1 && errno == EOWNERDEAD ? 0 : 1);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		haul_sender_free(sender, HAUL_ABORT);
		for (i = 0; i < 12000 && calls_of(&loan) < 1; i++)
			nanosleep(&pause, NULL);
		CHECK(calls_of(&loan) == 1);
	}
	close(pair[0]);
	close(pair[1]);
}

int main(void)
{
	bytes_and_files();
	loans();
	resets("sendfile");
	resets("splice");
	pending_signals();
	receiving();
	forwarding();
	errors();
	return 0;
}
