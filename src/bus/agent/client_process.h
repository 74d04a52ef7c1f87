/* The process at the other end of a client's connection, and its memory: files that it hands over (tb_alloc's memory,
 * used where it is), and any other address, which only the system can read and write. */
#ifndef TB_BUS_AGENT_CLIENT_PROCESS_H
#define TB_BUS_AGENT_CLIENT_PROCESS_H

#include "base/error.h"

#include <sys/types.h>

enum { TB__CLIENT_PROCESS_PIECES = 512 }; /* that one call of the system writes */

/* A file that a client has handed over, mapped once however often it comes. */
typedef struct tb__client_file {
    dev_t device;
    ino_t inode;
    void *base;
    size_t nbytes;
    size_t refs;
    struct tb__client_file *next;
} tb__client_file;

typedef struct tb__client_process {
    pid_t pid;
    int pidfd;           /* -1: the kernel has none */
    uint64_t start_time; /* in ticks since the system started: a pid may be used again */
    tb__client_file *files;
} tb__client_process;

/* Who is there, by the socket's credentials. TB_DENIED for another user's process. */
tb_status tb__client_process_init(tb__client_process *process, int socket);
void tb__client_process_fini(tb__client_process *process); /* no file is held any more */

/* Maps a file; what it gives is put back. */
tb_status tb__client_process_map_file(tb__client_process *process, int fd, tb__client_file **out);
void tb__client_process_unmap_file(tb__client_process *process, tb__client_file *file);

/* Whether all of these bytes are mapped in the process, and may be read, and written. */
tb_status tb__client_process_check_memory(const tb__client_process *process, uint64_t address, size_t nbytes,
                                          bool writes);

tb_status tb__client_process_read(const tb__client_process *process, uint64_t address, void *to, size_t nbytes);
/* Pieces of `nbytes` each, at the same offsets from `from` and from the address. */
tb_status tb__client_process_write(const tb__client_process *process, uint64_t address, const void *from,
                                   const size_t *offsets, size_t n, size_t nbytes);

#endif
