/* Sends a file, by sendfile: send_file FILE HOST PORT */
#define _POSIX_C_SOURCE 200809L
#include "cookbook.h"

#include <fcntl.h>
#include <sys/stat.h>

int main(int count, char **arguments)
{
	haul_sender *sender;
	struct stat status;
	uint64_t position = 0, length;
	int file, to;
	if (count != 4) {
		fprintf(stderr, "usage: send_file FILE HOST PORT\n");
		return 2;
	}
	file = open(arguments[1], O_RDONLY | O_CLOEXEC);
	if (file < 0 || fstat(file, &status) < 0) {
		perror(arguments[1]);
		return 1;
	}
	to = connect_to(arguments[2], arguments[3]);
	if (to < 0)
		return 1;
	if (haul_sender_new(to, NULL, &sender) < 0)
		fail("haul_sender_new");
	length = (uint64_t)status.st_size;
	while (position < length) {
		ssize_t sent = haul_send_file(sender, file, position, (size_t)(length - position));
		if (sent < 0)
			fail("haul_send_file");
		position += (uint64_t)sent;
	}
	haul_sender_free(sender, HAUL_LEAVE);
	close(to);
	close(file);
	return 0;
}
