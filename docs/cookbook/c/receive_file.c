/* Receives a file until the connection ends: receive_file FILE HOST PORT */
#define _POSIX_C_SOURCE 200809L
#include "cookbook.h"

#include <fcntl.h>

int main(int count, char **arguments)
{
	haul_receiver *receiver;
	uint64_t position = 0;
	ssize_t received;
	int file, from;
	if (count != 4) {
		fprintf(stderr, "usage: receive_file FILE HOST PORT\n");
		return 2;
	}
	file = open(arguments[1], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (file < 0) {
		perror(arguments[1]);
		return 1;
	}
	from = connect_to(arguments[2], arguments[3]);
	if (from < 0)
		return 1;
	if (haul_receiver_new(from, &receiver) < 0)
		fail("haul_receiver_new");
	while ((received = haul_receive_file(receiver, file, position, (size_t)1 << 30)) > 0)
		position += (uint64_t)received;
	if (received < 0)
		fail("haul_receive_file");
	haul_receiver_free(receiver);
	close(from);
	if (close(file) < 0) {
		perror(arguments[1]);
		return 1;
	}
	return 0;
}
