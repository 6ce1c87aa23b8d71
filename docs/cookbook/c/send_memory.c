/* Sends memory without a copy, if the network device allows: send_memory FILE HOST PORT */
#define _POSIX_C_SOURCE 200809L
#include "cookbook.h"

/* The kernel does not need the memory any more. */
static void release(void *context, const void *data, size_t sent, int outcome)
{
	int *copied = (int *)context;
	(void)sent;
	*copied += outcome == HAUL_COPIED;
	free((void *)data);
}

int main(int count, char **arguments)
{
	haul_sender *sender;
	FILE *file;
	int to, copied = 0;
	if (count != 4) {
		fprintf(stderr, "usage: send_memory FILE HOST PORT\n");
		return 2;
	}
	file = fopen(arguments[1], "rb");
	if (file == NULL) {
		perror(arguments[1]);
		return 1;
	}
	to = connect_to(arguments[2], arguments[3]);
	if (to < 0)
		return 1;
	if (haul_sender_new(to, NULL, &sender) < 0)
		fail("haul_sender_new");
	for (;;) {
		size_t size = (size_t)1 << 20, length;
		void *data = malloc(size);
		if (data == NULL)
			return 1;
		length = fread(data, 1, size, file);
		if (length == 0) {
			free(data);
			break;
		}
		/* The memory must not change until release() is called. On a blocking socket, the call
		 * waits while there are too many loans. */
		if (haul_lend(sender, data, length, release, &copied) < 0)
			fail("haul_lend");
		/* Calls release() for the loans that ended. */
		if (haul_reclaim(sender) < 0)
			fail("haul_reclaim");
	}
	if (ferror(file)) {
		perror(arguments[1]);
		return 1;
	}
	if (haul_wait_for_completions(sender, -1) < 0 || haul_reclaim(sender) < 0)
		fail("haul_reclaim");
	printf("loans that were copied: %d\n", copied);
	haul_sender_free(sender, HAUL_LEAVE);
	close(to);
	fclose(file);
	return 0;
}
