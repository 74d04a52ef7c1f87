/* Transports as the layers above see them: the registry, and wrappers with the defaults of optional slots. */
#ifndef TB_TRANSPORT_TRANSPORT_H
#define TB_TRANSPORT_TRANSPORT_H

#include "base/mem.h"
#include "base/text.h"
#include "tensorbus/transport.h"

/* An open transport. */
typedef struct tb_transport {
    const tb_transport_ops *ops;
    void *context;
} tb_transport;

/* All built-in and registered transports, in order of preference; ends with NULL. Registering makes a new table, and
 * old ones stay valid. */
extern const tb_transport_ops *const *_Atomic tb__transports;

tb_status tb__transport_open(const char *name, const tb_transport_env *env, tb_transport *out);
void tb__transport_close(tb_transport *transport);

/* Call the slot of that name, or the default that tensorbus/transport.h describes if it is NULL. */
bool tb__transport_reaches(const tb_transport *t, const void *address, size_t nbytes);
/* Also false for kinds that are not in `memory`. */
bool tb__transport_carries(const tb_transport *t, tb_mem_kind kind);
tb_status tb__transport_post(const tb_transport *t, tb_op *op);
/* The message of a failed operation. */
const char *tb__op_why(const tb_op *op);
void tb__transport_cancel(const tb_transport *t, tb_op *op);
bool tb__transport_is_reached(const tb_transport *t, int32_t peer);
void tb__transport_disconnect(const tb_transport *t, int32_t peer, const char *why);
tb_status tb__transport_register(const tb_transport *t, const tb_mem_desc *desc, tb_mem **out);
tb_status tb__transport_import(const tb_transport *t, int32_t peer, const tb_mem_key *key, tb_remote **out);
void *tb__transport_map(const tb_transport *t, tb_remote *remote);
bool tb__transport_is_valid(const tb_transport *t, const tb_remote *remote);
tb_status tb__transport_read(const tb_transport *t, tb_remote *remote, const tb_range *ranges, size_t nranges,
                             const tb_piece *pieces, size_t npieces);
tb_status tb__transport_send_fds(const tb_transport *t, int32_t peer, const int *fds, size_t nfds, uint64_t *id);
tb_status tb__transport_take_fds(const tb_transport *t, int32_t peer, uint64_t id, int *fds, size_t nfds);

/* Bytes in all pieces. (TB_API here and in other internal headers: exported to the other libraries of
 * tensorbus.) */
TB_API size_t tb__pieces_size(const tb_piece *pieces, size_t npieces);

/* Copies between pieces and contiguous memory, beginning `skip` bytes into the pieces. */
TB_API void tb__pieces_gather(const tb_piece *pieces, size_t npieces, size_t skip, void *to, size_t nbytes);
TB_API void tb__pieces_scatter(const tb_piece *pieces, size_t npieces, size_t skip, const void *from, size_t nbytes);

/* A position in a long list of pieces. Zero-initialised: the beginning. */
typedef struct tb__piece_cursor {
    size_t piece, before; /* before: bytes before this piece */
} tb__piece_cursor;

/* Moves the cursor to the piece with byte `at`, or to the end. */
void tb__pieces_seek(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t at);

/* As above, for repeated calls: starts at the cursor, which moves to `skip`. */
void tb__pieces_gather_on(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t skip, void *to,
                          size_t nbytes);
void tb__pieces_scatter_on(const tb_piece *pieces, size_t npieces, tb__piece_cursor *mark, size_t skip,
                           const void *from, size_t nbytes);

/* Copies from pieces to pieces; both hold at least nbytes. */
void tb__pieces_copy(const tb_piece *from, size_t nfrom, const tb_piece *to, size_t nto, size_t nbytes);

/* Checks that the ranges lie inside memory of nbytes and have as many bytes as the pieces. `rank` owns the memory. */
tb_status tb__ranges_check(const tb_range *ranges, size_t nranges, const tb_piece *pieces, size_t npieces,
                           size_t nbytes, int32_t rank);

/* Copies ranges of memory to the pieces. Call tb__ranges_check first. */
void tb__ranges_copy(const void *memory, const tb_range *ranges, size_t nranges, const tb_piece *pieces,
                     size_t npieces);

/* Those of this build, in order of preference: each is a folder with a table tb__NAME_ops. */
#define TB__BUILT_IN_TRANSPORTS(each) each(self) each(shm) each(ucx) each(nccl) each(nvshmem)
#define TB__DECLARE_TRANSPORT(name)   extern const tb_transport_ops tb__##name##_ops;
TB__BUILT_IN_TRANSPORTS(TB__DECLARE_TRANSPORT)

/* ---- ucx ------------------------------------------------------------------------------------------------------- */

enum { TB__UCX_MAJOR = 1, TB__UCX_MINOR = 13 }; /* the oldest version that is supported */

/* "1.13.1, /usr/lib/x86_64-linux-gnu/libucp.so.0": the UCX that was found, also if it is too old; empty: none was. */
const char *tb__ucx_found(void);

/* "tcp/eth0 posix/memory": the lanes that an open ucx transport may use, as UCX's environment variables allow. */
void tb__ucx_list_lanes(const tb_transport *ucx, tb__text *out);

/* Whether UCX would listen at a public address on this interface, and which one. */
enum { TB__ADDRESS_TEXT = 46 };
bool tb__interface_is_public(const char *name, char address[TB__ADDRESS_TEXT]);

/* Whether a lane reaches other machines. */
bool tb__ucx_lane_is_network(const char *lane);

/* ---- nccl ------------------------------------------------------------------------------------------------------ */

enum { TB__NCCL_OLDEST = 21900 }; /* the oldest version that is supported, as NCCL counts: 2.19.0 */

/* "2.30.7, /usr/lib/x86_64-linux-gnu/libnccl.so.2": the NCCL that was found, also if it is too old; empty: none was. */
const char *tb__nccl_found(void);

/* ---- nvshmem --------------------------------------------------------------------------------------------------- */

enum { TB__NVSHMEM_MAJOR = 3 }; /* the version that is supported */

/* "3.8.0, /usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3": what was found; empty: nothing was. */
const char *tb__nvshmem_found(void);

#endif
