/* How the ranks of a communicator find one store: the first of them serves it, the others are told where. */
#ifndef TB_BUS_MPI_BOOTSTRAP_H
#define TB_BUS_MPI_BOOTSTRAP_H

#include "bus/store/server.h"

#include <stdint.h>
#include <sys/socket.h>

enum {
    BOOTSTRAP_ADDRESSES = 16,
    BOOTSTRAP_FOLDER = 32,
    BOOTSTRAP_URL = 128,
    BOOTSTRAP_SECRET = 33,
    BOOTSTRAP_NAME = 256,
};

/* What the others are told. Plain bytes. */
typedef struct tb__bootstrap_info {
    unsigned char uid[16];
    char token[BOOTSTRAP_SECRET];
    char group[BOOTSTRAP_NAME];
    char folder[BOOTSTRAP_FOLDER]; /* of a Unix socket; "": it is at the addresses */
    struct sockaddr_storage addresses[BOOTSTRAP_ADDRESSES];
    uint32_t naddresses;
} tb__bootstrap_info;

/* A number that is equal for processes that can meet at a Unix socket: the same boot of the same kernel, the same
 * network and mount namespaces. */
uint64_t tb__bootstrap_machine_hash(void);

/* Serves a store: at a socket in a new folder that only this user can enter, or at a port of all addresses. */
tb_status tb__bootstrap_serve(const char *group, bool is_one_host, tb__bootstrap_info *out, tb__store_server **server);

/* Where this process reaches it: of several addresses, the one that answers first. */
tb_status tb__bootstrap_find(const tb__bootstrap_info *info, int64_t deadline_ms, char url[BOOTSTRAP_URL]);

/* The folder is there for as long as anybody is in it: each rank enters, which makes a file with the number of its
 * process, and leaves, and whoever leaves last removes the folder. */
tb_status tb__bootstrap_enter_folder(const tb__bootstrap_info *info);
void tb__bootstrap_leave_folder(const tb__bootstrap_info *info);

#endif
