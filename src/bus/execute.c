/* tb_reshard_execute: sends, receives, or both, according to the groups that this process is in. */
#include "bus/exchange.h"

#include "base/opts.h"

#include <stdio.h>
#include <string.h>

tb_status tb__local_batch_roles(tb_batch *batch, const char *from, bool *sends, bool *receives, const char **to) {
    bool is_known = false;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        for (int side = 0; side < 2; side++) {
            if (strcmp(exchange->pair->sides[side].group, from) != 0)
                continue;
            is_known = true;
            *sends |= exchange->sides[side].is_here;
            *receives |= exchange->sides[!side].is_here;
            *to = exchange->pair->sides[!side].group;
        }
    }
    return is_known ? TB_OK : tb__fail(TB_INVALID, "group '%.100s' is in no pair of batch '%s'", from, batch->name);
}

static tb_status wait_and_destroy(tb_transfer *transfer, tb_status status, tb_transfer_state *out) {
    char why[TB__WHY_MAX] = "";
    if (transfer && status == TB_OK)
        status = tb_wait(transfer, TB_COMMITTED, -1);
    if (status != TB_OK)
        snprintf(why, sizeof why, "%s", tb_error_detail());
    if (transfer && out)
        tb_transfer_query(transfer, out);
    tb_transfer_destroy(transfer);
    return status == TB_OK ? TB_OK : tb__fail(status, "%s", why);
}

tb_status tb_reshard_execute(tb_batch *batch, const char *from, const tb_transfer_opts *opts, tb_transfer_state *sent,
                             tb_transfer_state *received) {
    tb_transfer_opts o;
    tb_transfer *sending = NULL, *receiving = NULL;
    bool sends = false, receives = false;
    const char *to = NULL;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    tb_transfer_state nothing = {0};
    if (sent)
        TB_TRY(tb__struct_write(sent, &nothing, sizeof nothing, "a tb_transfer_state"));
    if (received)
        TB_TRY(tb__struct_write(received, &nothing, sizeof nothing, "a tb_transfer_state"));
    TB_TRY(tb_batch_register(batch, o.timeout_ms));
    TB_TRY(tb__batch_roles(batch, from, &sends, &receives, &to));
    tb_status status = TB_OK;
    if (receives) {
        o.group = to;
        status = tb_recv(batch, &o, &receiving);
    }
    if (sends && status == TB_OK) {
        o.group = from;
        status = tb_send(batch, &o, &sending);
    }
    status = wait_and_destroy(sending, status, sent);
    return wait_and_destroy(receiving, status, received);
}
