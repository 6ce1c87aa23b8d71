/* Relays one client after the other to a host, spliced: relay LISTEN_PORT HOST PORT */
#define _POSIX_C_SOURCE 200809L
#include "cookbook.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>

static void relay(int client, int server)
{
	haul_forwarder *forwarder;
	short events[2] = {POLLIN | POLLOUT, POLLIN | POLLOUT};
	int is_left_out[2] = {0, 0}, step;
	fcntl(client, F_SETFL, O_NONBLOCK);
	fcntl(server, F_SETFL, O_NONBLOCK);
	if (haul_forwarder_new(client, server, &forwarder) < 0)
		fail("haul_forwarder_new");
	while ((step = haul_forwarder_step(forwarder, events)) > 0) {
		struct pollfd polled[2];
		int side;
		if (step == HAUL_YIELD)
			continue;
		polled[0].fd = client;
		polled[1].fd = server;
		for (side = 0; side < 2; side++) {
			polled[side].events = events[side];
			polled[side].revents = 0;
			/* A side that hung up and is not waited for would wake every poll. */
			if (events[side] != 0)
				is_left_out[side] = 0;
			if (is_left_out[side])
				polled[side].fd = -1;
		}
		if (poll(polled, 2, -1) < 0 && errno != EINTR) {
			perror("poll");
			exit(1);
		}
		for (side = 0; side < 2; side++) {
			if (events[side] == 0 && (polled[side].revents & (POLLHUP | POLLERR)))
				is_left_out[side] = 1;
			events[side] = polled[side].revents;
		}
	}
	if (step < 0)
		fprintf(stderr, "relaying: %s\n", haul_error());
	/* Without HAUL_DONE, both connections are reset. */
	haul_forwarder_free(forwarder);
}

int main(int count, char **arguments)
{
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	int listener, on = 1;
	if (count != 4) {
		fprintf(stderr, "usage: relay LISTEN_PORT HOST PORT\n");
		return 2;
	}
	memset(&address, 0, sizeof(address));
	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons((uint16_t)atoi(arguments[1]));
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0 ||
	    bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    listen(listener, 16) < 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &length) < 0) {
		perror("listening");
		return 1;
	}
	printf("listening at port %d\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		const struct linger reset = {1, 0};
		int client = accept(listener, NULL, NULL), server;
		if (client < 0) {
			/* For a while there may be no descriptor. */
			perror("accept");
			sleep(1);
			continue;
		}
		server = connect_to(arguments[2], arguments[3]);
		if (server >= 0) {
			relay(client, server);
			close(server);
		} else {
			/* A reset, so that the client does not take this for the end of a stream. */
			setsockopt(client, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
		}
		close(client);
	}
}
