/* Lists the lanes that UCX may use: those of this machine that UCX_TLS and UCX_NET_DEVICES allow. */
#include "transport/ucx/ucx.h"

#include <stdio.h>
#include <string.h>

/* Parses lines such as "#      resource 2  :  md 1  dev 2  flags -- tcp/eth0". UCX 1.13 has no other interface for
 * this. */
void tb__ucx_list_lanes(const tb_transport *transport, tb__text *out) {
    const ucx *u = transport->context;
    char *text = NULL;
    size_t nbytes;
    FILE *stream = open_memstream(&text, &nbytes);
    if (!stream)
        return;
    u->call->context_print_info(u->context, stream);
    if (fclose(stream) == 0) {
        char *rest = text;
        for (const char *line; (line = strsep(&rest, "\n"));) {
            const char *lane = strrchr(line, ' ');
            if (strstr(line, " resource ") && lane && strchr(lane, '/'))
                tb__text_add(out, "%s%s", out->count ? " " : "", lane + 1);
        }
    }
    free(text);
}

bool tb__ucx_lane_is_network(const char *lane) {
    static const char *const kinds[] = {"tcp/", "rc_", "dc_", "ud_", "srd/", "ugni_"};
    bool is_network = false;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        is_network = is_network || strncmp(lane, kinds[i], strlen(kinds[i])) == 0;
    return is_network && strcmp(lane, "tcp/lo") != 0;
}
