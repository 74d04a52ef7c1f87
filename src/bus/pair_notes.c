/* Packs and unpacks requests and refusals. Notes come from other processes and may be malformed. */
#include "bus/pair_notes.h"

#include <stdio.h>

/* The least timeout for publishing a note, also for a call that does not wait, or for a refusal that is found at the
 * deadline; and the timeout for withdrawing one. */
enum { NOTE_MS = 1000 };

static bool unpack_refusal(tb__unpack *u, tb__pair_refusal *out) {
    out->status = tb__unpack_status(u);
    out->nsubjects = tb__unpack_u32(u);
    if (u->failed || out->nsubjects > TB__MOST_SUBJECTS)
        return false;
    for (size_t i = 0; i < out->nsubjects; i++) {
        tb__subject *s = &out->subjects[i];
        snprintf(s->group, sizeof s->group, "%s", tb__unpack_string(u));
        s->index = (int32_t)tb__unpack_u32(u);
        s->rank = (int32_t)tb__unpack_u32(u);
        s->incarnation = tb__unpack_u64(u);
    }
    return !u->failed;
}

bool tb__pair_read_note(const tb__note *from, tb__pair_note *out) {
    tb__unpack u = {from->data, (const unsigned char *)from->data + from->nbytes, false};
    out->remote = tb__unpack_string(&u);
    out->layout = tb__unpack_string(&u);
    out->round = tb__unpack_u32(&u);
    (void)tb__unpack_u32(&u); /* the serial number, which makes a repeated request a change */
    out->why = tb__unpack_string(&u);
    return unpack_refusal(&u, &out->refusal) && tb__unpack_is_done(&u);
}

bool tb__pair_read_request(const tb__note *from, tb__pair_note *out) {
    return tb__pair_read_note(from, out) && out->refusal.status == TB_OK;
}

bool tb__pair_is_request(const tb__note *from) {
    tb__pair_note unused;
    return tb__pair_read_request(from, &unused);
}

tb_status tb__pair_publish(const tb_pair *pair, uint32_t round, const tb__pair_refusal *refusal, const char *why,
                           int64_t deadline_ms) {
    tb__pack pack = {0};
    tb__pack_string(&pack, pair->sides[!pair->side].group);
    tb__pack_string(&pack, pair->sides[pair->side].layout);
    tb__pack_u32(&pack, round);
    tb__pack_u32(&pack, pair->serial);
    tb__pack_string(&pack, why);
    tb__pack_status(&pack, refusal->status);
    tb__pack_u32(&pack, (uint32_t)refusal->nsubjects);
    for (size_t i = 0; i < refusal->nsubjects; i++) {
        tb__pack_string(&pack, refusal->subjects[i].group);
        tb__pack_u32(&pack, (uint32_t)refusal->subjects[i].index);
        tb__pack_u32(&pack, (uint32_t)refusal->subjects[i].rank);
        tb__pack_u64(&pack, refusal->subjects[i].incarnation);
    }
    int left_ms = tb__ms_until(deadline_ms);
    tb_status status =
        pack.failed ? TB_NO_MEMORY
                    : tb__directory_publish(pair->world->directory, pair->name, pair->sides[pair->side].group,
                                            pair->index, pack.data, pack.count, left_ms > NOTE_MS ? left_ms : NOTE_MS);
    tb__pack_fini(&pack);
    return status;
}

void tb__pair_withdraw(const tb_pair *pair) {
    tb__directory_withdraw(pair->world->directory, pair->name, pair->sides[pair->side].group, pair->index, NOTE_MS);
}

/* The process that has the seat now; its rank is TB_NO_RANK if the seat is empty. */
static tb_status find_subject(const tb_pair *pair, const char *group, int32_t index, tb__subject *out) {
    tb__roster roster;
    TB_TRY(tb__directory_roster(pair->world->directory, group, &roster));
    *out = (tb__subject){.index = index, .rank = TB_NO_RANK};
    snprintf(out->group, sizeof out->group, "%s", group);
    if (index >= 0 && index < roster.size) {
        out->rank = roster.member[index].rank;
        out->incarnation = roster.member[index].incarnation;
    }
    tb__roster_fini(&roster);
    return TB_OK;
}

tb_status tb__refusal_add_subject(const tb_pair *pair, tb__pair_refusal *refusal, tb_status status, const char *group,
                                  int32_t index) {
    tb__saved_detail why = tb__save_detail();
    if (refusal->nsubjects < TB__MOST_SUBJECTS &&
        find_subject(pair, group, index, &refusal->subjects[refusal->nsubjects]) == TB_OK)
        refusal->nsubjects++;
    return tb__fail(status, "%s", why.text);
}

/* Whether another process has taken the seat of one that the refusal names. */
static bool is_outdated(const tb_pair *pair, const tb__pair_refusal *refusal) {
    for (size_t i = 0; i < refusal->nsubjects; i++) {
        const tb__subject *then = &refusal->subjects[i];
        tb__subject now;
        if (find_subject(pair, then->group, then->index, &now) == TB_OK && now.rank != TB_NO_RANK &&
            (now.rank != then->rank || now.incarnation != then->incarnation))
            return true;
    }
    return false;
}

tb_status tb__pair_check_refusals(const tb_pair *pair, const tb__notes *notes, tb__pair_refusal *refusal,
                                  uint32_t *last_round) {
    tb_status status = TB_OK;
    *last_round = pair->round;
    for (size_t i = 0; i < notes->count; i++) {
        tb__pair_note n;
        if (!tb__pair_read_note(&notes->item[i], &n))
            continue;
        *last_round = n.round > *last_round ? n.round : *last_round;
        if (status != TB_OK || n.refusal.status == TB_OK || n.round < pair->round || is_outdated(pair, &n.refusal))
            continue;
        *refusal = n.refusal;
        status = tb__fail(n.refusal.status, "%s", n.why);
    }
    return status;
}

void tb__pair_find_refusal(const tb_pair *pair, char *out, size_t room) {
    tb__notes notes;
    tb__pair_refusal refusal;
    uint32_t unused;
    *out = '\0';
    tb__directory_notes(pair->world->directory, pair->name, &notes);
    if (tb__pair_check_refusals(pair, &notes, &refusal, &unused) != TB_OK)
        snprintf(out, room, "%s", tb_error_detail());
    tb__notes_fini(&notes);
}
