/* What the programs of the cookbook share. */
#ifndef COOKBOOK_H
#define COOKBOOK_H

#include <haul.h>

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Ends the program with the message of haul. */
static void fail(const char *call)
{
	fprintf(stderr, "%s: %s\n", call, haul_error());
	exit(1);
}

/* Connects to a host. Prints the problem, and returns -1, if that fails. */
static int connect_to(const char *host, const char *port)
{
	struct addrinfo hints, *addresses, *address;
	int socket_ = -1, problem;
	memset(&hints, 0, sizeof(hints));
	hints.ai_socktype = SOCK_STREAM;
	problem = getaddrinfo(host, port, &hints, &addresses);
	if (problem != 0) {
		fprintf(stderr, "%s: %s\n", host, gai_strerror(problem));
		return -1;
	}
	for (address = addresses; address != NULL; address = address->ai_next) {
		socket_ = socket(address->ai_family, address->ai_socktype, address->ai_protocol);
		if (socket_ >= 0 && connect(socket_, address->ai_addr, address->ai_addrlen) == 0)
			break;
		if (socket_ >= 0)
			close(socket_);
		socket_ = -1;
	}
	freeaddrinfo(addresses);
	if (socket_ < 0)
		perror(host);
	return socket_;
}

#endif
