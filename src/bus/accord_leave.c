/* A rank leaves an accord, because its batch is destroyed: what it says, and what the others make of it. */
#include "bus/accord.h"

/* ---- Out ------------------------------------------------------------------------------------------------------- */

static void pack_failure(tb__pack *pack, const tb__failure *last) {
    tb__pack_u64(pack, last->attempt);
    tb__pack_u64(pack, last->number);
    tb__pack_status(pack, last->status);
    tb__pack_string(pack, last->why);
}

/* The failures are for those who have not heard of them: others leave, or are lost, because of them. Ranks of 0.1.0
 * read no further than to the sentence before them. */
void tb__accord_leave(tb__accord *accord) {
    bool is_broken = accord->state == ACCORD_BROKEN;
    const char *why = is_broken ? accord->all.why : "";
    tb__failure last[2] = {{.why = ""}, {.why = ""}};
    tb__pack goodbye = {0};
    tb__pack_u32(&goodbye, accord->has_agreed);
    for (int side = 0; side < 2; side++) {
        if (accord->flows[side])
            last[side] = tb__flow_last_failure(accord->flows[side]);
        why = *why ? why : last[side].why;
        tb__pack_u64(&goodbye, accord->flows[side] ? tb__flow_started(accord->flows[side]) : 0);
    }
    tb__pack_status(&goodbye, is_broken ? accord->all.status : TB_OK);
    tb__pack_string(&goodbye, why);
    for (int side = 0; side < 2; side++)
        pack_failure(&goodbye, &last[side]);
    tb__assembly_leave(&accord->all, &goodbye);
    tb__pack_fini(&goodbye);
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

void tb__accord_tell_gone(tb__accord *accord, size_t gone) {
    for (int i = 0; i < 2; i++) {
        const tb__goodbye *f = &accord->goodbyes[gone][i];
        if (accord->flows[i])
            tb__flow_gone(accord->flows[i], gone, f->started, &f->last);
    }
}

/* What a rank had said does not count any more. Bodies stay: they are what their hashes say. */
static void forget_manifest(tb__accord *accord, size_t at) {
    tb__assembly_forget(&accord->all, at);
    for (int side = 0; side < 2; side++) {
        for (int32_t seat = 0; seat < accord->pair->sides[side].size; seat++) {
            if (accord->pair->sides[side].peers[seat] == accord->all.peers[at])
                accord->sides[side].has_come[seat] = false;
        }
    }
}

/* A direction in which nothing failed ends for the reason that the rank has for leaving. */
static void keep_failure(tb__goodbye *f, tb__failure last, const char *why) {
    free(f->why);
    f->why = tb__strdup(last.status != TB_OK ? last.why : why);
    f->last = last;
    f->last.why = f->why ? f->why : "";
}

static tb__failure unpack_failure(tb__unpack *message) {
    tb__failure last;
    last.attempt = tb__unpack_u64(message);
    last.number = tb__unpack_u64(message);
    last.status = tb__unpack_status(message);
    last.why = tb__unpack_string(message);
    if (message->failed || last.status == TB_OK)
        last = (tb__failure){.why = ""};
    return last;
}

/* What needs the rank no more goes on: if it had agreed, everybody has come, although their manifests may still be on
 * their way to us. If it left because something went wrong, that is the reason here, too: it may have heard of a dead
 * rank before us. */
void tb__accord_on_goodbye(tb__assembly *all, size_t at, tb__unpack *message) {
    tb__accord *accord = (tb__accord *)all;
    bool had_agreed = tb__unpack_u32(message) != 0;
    for (int i = 0; i < 2; i++)
        accord->goodbyes[at][i].started = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool has_failures = message->at < message->end; /* else it is of 0.1.0 */
    for (int i = 0; i < 2; i++)
        keep_failure(&accord->goodbyes[at][i], has_failures ? unpack_failure(message) : (tb__failure){0}, why);
    if (accord->state == ACCORD_WAITING && (!had_agreed || message->failed)) {
        forget_manifest(accord, at); /* whatever went wrong was the batch it had before, or is heard of here, too */
        return;
    }
    if (accord->state == ACCORD_AGREED && !message->failed && status == TB_LOST) {
        tb__set_detail("%s", why);
        tb__accord_lose_rank(accord);
    } else if (accord->state == ACCORD_AGREED && !message->failed && status != TB_OK) {
        tb__accord_break(accord, tb__fail(status, "%s", why), false);
    }
    tb__accord_tell_gone(accord, at);
}

void tb__accord_free_goodbyes(tb__accord *accord) {
    for (size_t i = 0; accord->goodbyes && i < accord->all.npeers; i++) {
        free(accord->goodbyes[i][0].why);
        free(accord->goodbyes[i][1].why);
    }
    free(accord->goodbyes);
}
