/* The payloads of commands, in MessagePack: meshes, placements, tensors. Maps are described by tables, like messages;
 * placements are the same arrays as in our JSON.
 *
 *   mesh        {shape: [2, 2], ranks: [4, 5, 6, 7] or nil}        nil: 0, 1, 2, ...
 *   placements  one to a dim of the mesh: ["R"], ["S", dim], ["SS", dim, split], ["BS", dim, size, ...],
 *               ["E", dim, [[[start, stop], ...], ...]] (a list for each coordinate), ["P", op]
 *   tensor      see tb__tensor_payload
 *   memory      see tb__device_memory
 *   state       see tb__state_payload
 *
 * Decoders check everything that can be checked without the rest of the batch. */
#ifndef TB_BUS_PROTOCOL_PAYLOAD_H
#define TB_BUS_PROTOCOL_PAYLOAD_H

#include "bus/protocol/codec.h"
#include "tensorbus/plan.h"

enum { TB__MAX_FDS = 1 << 16 }; /* that one frame can name */

extern const tb__schema tb__mesh_schema, tb__memory_schema, tb__device_memory_schema, tb__tensor_schema,
    tb__state_schema;

/* Append the two payloads of a layout. */
tb_status tb__mesh_encode(const tb_layout *layout, tb__bytes *out);
tb_status tb__placements_encode(const tb_layout *layout, tb__bytes *out);

tb_status tb__layout_decode(tb__blob mesh, tb__blob placements, tb_layout **out);

/* Other placements on the mesh of a layout. */
tb_status tb__placements_decode(const tb_layout *mesh, tb__blob placements, tb_layout **out);

typedef enum tb__memory_kind {
    TB__MEMORY_NONE,
    TB__MEMORY_FD,      /* in a file that came with the frame */
    TB__MEMORY_ADDRESS, /* in the client's own address space */
    TB__MEMORY_DEVICE,  /* in device memory that came with the frame */
} tb__memory_kind;

/* The place of a tensor's bytes. `offset + nbytes` and `address + nbytes` do not overflow; the agent checks that they
 * lie in the file or in the client's maps. */
typedef struct tb__payload_memory {
    tb__memory_kind kind;
    uint32_t fd;      /* index among the descriptors of the frame, or among its device memories */
    uint64_t offset;  /* in the file, or in the device memory */
    uint64_t address; /* the client's; 0: unknown, of clients of version 1, in a file or in device memory */
    uint64_t nbytes;
    const char *copied_from; /* the device whose memory the client copies from and to this place; NULL: none */
} tb__payload_memory;

/* Device memory of the client, with the data that the agent needs to map it. */
typedef struct tb__device_memory {
    uint64_t id;       /* the client's number of it: the same memory has the same */
    uint64_t fd, nfds; /* its descriptors among those of the frame */
    tb__blob key;      /* the device's */
} tb__device_memory;

/* A tensor as a client has it; the members mean what those of tb_tensor do. */
typedef struct tb__tensor_payload {
    const char *name;
    tb_dtype dtype;
    tb_shape shape; /* global */
    bool has_strides;
    int64_t strides[TB_MAX_DIMS];
    tb_layout *layout;  /* of this side, for this tensor; NULL: the pair's */
    const char *view;   /* NULL: as it is. Like `encode` and `scale_group`, the batch checks it */
    const char *encode; /* NULL: numbers */
    const char *scale_group;
    uint32_t group;
    tb_dtype wire_dtype;       /* TB_DTYPE_NONE: none asked for */
    tb__payload_memory data;   /* NONE only where there are no bytes */
    tb__payload_memory scales; /* NONE: the format has none */
    tb__payload_memory scale;  /* one float; NONE: likewise */
} tb__tensor_payload;

/* The state of a transfer, of one pair or all of them. */
typedef struct tb__state_payload {
    tb_transfer_state state;
    const char *message;    /* "" unless it failed */
    uint64_t received;      /* the version that the client has in its tensors; 0: none */
    bool is_torn, is_mixed; /* they are; of all pairs together, they differ */
    const char *side;       /* this side's group, unless it is the agent's own; NULL: it is */
    bool is_in_doubt;       /* of all pairs together: a receive has ended with TB_IN_DOUBT */
} tb__state_payload;

/* Appends the payload. Omits fields of the layout's mesh that equal the pair's; `pair` may be NULL. */
tb_status tb__tensor_encode(const tb__tensor_payload *tensor, const tb_layout *pair, tb__bytes *out);

/* Text is the arena's. The layout is the caller's, to be destroyed. */
tb_status tb__tensor_decode(tb__blob payload, const tb_layout *pair, tb__arena *arena, tb__tensor_payload *out);

#endif
