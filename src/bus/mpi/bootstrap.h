/* The ranks of an MPI communicator find one store: rank 0 serves it, and broadcasts where. */
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

/* What rank 0 broadcasts. Plain bytes. */
typedef struct tb__bootstrap_info {
    unsigned char uid[16];
    char token[BOOTSTRAP_SECRET];
    char group[BOOTSTRAP_NAME];
    char folder[BOOTSTRAP_FOLDER]; /* of the store's Unix socket; "": it listens at the addresses */
    struct sockaddr_storage addresses[BOOTSTRAP_ADDRESSES];
    uint32_t naddresses;
} tb__bootstrap_info;

/* A hash that is equal for processes that can share a Unix socket: the same boot of the same kernel, the same network
 * and mount namespaces. */
uint64_t tb__bootstrap_machine_hash(void);

/* Serves a store: at a socket in a new folder that only this user can enter, or at a port of all addresses. */
tb_status tb__bootstrap_serve(const char *group, bool is_one_host, tb__bootstrap_info *out, tb__store_server **server);

/* The URL at which this process reaches the store: of several addresses, the first that answers. */
tb_status tb__bootstrap_find(const tb__bootstrap_info *info, int64_t deadline_ms, char url[BOOTSTRAP_URL]);

/* The folder exists while any rank uses it: each creates a file named by its process number, and removes it when it
 * leaves; the last rank removes the folder. */
tb_status tb__bootstrap_enter_folder(const tb__bootstrap_info *info);
void tb__bootstrap_leave_folder(const tb__bootstrap_info *info);

#endif
