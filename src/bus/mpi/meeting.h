/* How the ranks of a communicator find one store: the first of them serves it, the others are told where. */
#ifndef TB_BUS_MPI_MEETING_H
#define TB_BUS_MPI_MEETING_H

#include "bus/store/server.h"

#include <stdint.h>
#include <sys/socket.h>

enum {
    MEETING_ADDRESSES = 16,
    MEETING_FOLDER = 32,
    MEETING_URL = 128,
    MEETING_SECRET = 33,
    MEETING_NAME = 256,
};

/* What the others are told. Plain bytes. */
typedef struct tb__invitation {
    unsigned char uid[16];
    char token[MEETING_SECRET];
    char group[MEETING_NAME];
    char folder[MEETING_FOLDER]; /* of a Unix socket; "": it is at the addresses */
    struct sockaddr_storage addresses[MEETING_ADDRESSES];
    uint32_t naddresses;
} tb__invitation;

/* A number that is equal for processes that can meet at a Unix socket: the same boot of the same kernel, the same
 * network and mount namespaces. */
uint64_t tb__meeting_host(void);

/* Serves a store: at a socket in a new folder that only this user can enter, or at a port of all addresses. */
tb_status tb__meeting_serve(const char *group, bool is_one_host, tb__invitation *out, tb__store_server **server);

/* Where this process reaches it: of several addresses, the one that answers first. */
tb_status tb__meeting_find(const tb__invitation *invitation, int64_t deadline_ms, char url[MEETING_URL]);

/* The folder is there for as long as anybody is in it: each rank enters, which makes a file with the number of its
 * process, and leaves, and whoever leaves last removes the folder. */
tb_status tb__meeting_enter(const tb__invitation *invitation);
void tb__meeting_leave(const tb__invitation *invitation);

#endif
