/* Direct chunks: which lanes support them, and which bytes of an operation they have. */
#include "transport/ucx/ucx.h"

#include <stdio.h>
#include <string.h>

int tb__ucx_direct = -1;

/* Parses a line such as " lane[0]:  4:rc_mlx5/mlx5_0:1.0 md[3] -> ...": the lane's transport stands between the second
 * colon and the slash. TCP is not direct: a copy is faster there. */
static bool is_direct_lane(const char *line) {
    const char *at = strstr(line, "lane[");
    at = at ? strstr(at, "]:") : NULL;
    at = at ? strchr(at + 2, ':') : NULL;
    const char *end = at ? strchr(at, '/') : NULL;
    if (!end)
        return false;
    size_t n = (size_t)(end - ++at);
    static const char *const kinds[] = {"rc", "dc", "ud", "cma", "knem", "xpmem", "posix", "sysv"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t length = strlen(kinds[i]);
        if (n >= length && strncmp(at, kinds[i], length) == 0 && (n == length || at[length] == '_'))
            return true;
    }
    return false;
}

/* UCX 1.13 can only print its lanes. */
bool ucx_has_direct_lanes(const ucx *u, ucp_ep_h ep) {
    char *text = NULL;
    size_t nbytes;
    FILE *stream = open_memstream(&text, &nbytes);
    if (!stream)
        return false;
    u->call->ep_print_info(ep, stream);
    bool is_direct = false;
    if (fclose(stream) == 0) {
        char *rest = text;
        for (char *line; (line = strsep(&rest, "\n")) && !is_direct;)
            is_direct = is_direct_lane(line);
    }
    free(text);
    return is_direct;
}

/* An empty span at byte `at`. */
static ucx_span seek_span(ucx_posted *p, size_t at) {
    tb__pieces_seek(p->op->pieces, p->op->npieces, &p->mark, at);
    return (ucx_span){.pieces = p->op->pieces + p->mark.piece, .skip = at - p->mark.before};
}

/* Extends the span by nbytes, which must exist. */
static void extend_span(ucx_span *place, size_t nbytes) {
    size_t skip = place->skip;
    for (const tb_piece *piece = place->pieces; nbytes > 0; piece++, skip = 0) {
        size_t here = piece->nbytes - skip < nbytes ? piece->nbytes - skip : nbytes;
        place->nbytes += here;
        place->npieces += here > 0;
        nbytes -= here;
    }
}

static bool has_long_pieces(const ucx_span *place) {
    return place->npieces == 1 || place->nbytes / place->npieces >= UCX_PIECE_MIN;
}

bool ucx_span_next(ucx_posted *p, size_t at, size_t most, ucx_span *out) {
    size_t left = p->nbytes - at;
    ucx_span place = seek_span(p, at);
    size_t here = place.pieces->nbytes - place.skip;
    if (ucx_is_on_device(p->op)) {
        extend_span(&place, left < UCX_DEVICE_SIZE ? left : UCX_DEVICE_SIZE);
        *out = place;
        return true;
    }
    size_t nbytes = here >= UCX_PIECE_LONG ? here : left;
    extend_span(&place, nbytes < most ? nbytes : most);
    if (place.nbytes < UCX_DIRECT_MIN || !has_long_pieces(&place))
        return false;
    *out = place;
    return true;
}

bool ucx_span_all(ucx_posted *p, size_t at, size_t nbytes, ucx_span *out) {
    if (nbytes == 0)
        return false;
    ucx_span place = seek_span(p, at);
    extend_span(&place, nbytes);
    *out = place;
    return has_long_pieces(&place);
}

void *ucx_span_memory(const tb_op *op, const ucx_span *place, ucp_dt_iov_t *list, ucp_request_param_t *param,
                      size_t *count) {
    param->memory_type = ucx_is_on_device(op) ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    if (place->npieces == 1) {
        *count = place->nbytes;
        return (char *)place->pieces->base + place->skip;
    }
    size_t n = 0, left = place->nbytes, skip = place->skip;
    for (const tb_piece *piece = place->pieces; left > 0; piece++, skip = 0) {
        size_t here = piece->nbytes - skip < left ? piece->nbytes - skip : left;
        if (here > 0)
            list[n++] = (ucp_dt_iov_t){.buffer = (char *)piece->base + skip, .length = here};
        left -= here;
    }
    param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    param->datatype = ucp_dt_make_iov();
    *count = n;
    return list;
}
