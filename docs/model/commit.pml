/* The decision about shadowed receives (src/bus/commit.h), for Spin: N ranks of one engine, two receives through two
 * pairs, one store. docs/model/check runs it, and the mutations below, each of which has to fail.
 *
 * What is modelled. Ranks make the transitions of src/bus/commit_table.h. A store call is a request, its application and
 * its reply, each a step of its own: a call that timed out may still be applied. At most two faults: a rank is killed,
 * and another process may get its number; the store stops answering, for a while, or is emptied and has a new mark; a
 * rank cancels; a rank takes another vector than the lead's. After the first fault any rank may have a reason to abort.
 * Ranks relay outcomes, and may forget that of the first receive when the second has begun.
 *
 * What is checked:
 * - no rank has committed a receive that another one has aborted; ranks that died later count, for their senders have
 *   heard them;
 * - a receive is committed only if all ranks were prepared for it, with one vector;
 * - a rank in doubt serves neither version;
 * - without faults, all ranks commit both receives;
 * - when nothing can happen any more, and the store is the one it was, no rank is in doubt or waits.
 *
 * Mutations, each without one guard: NO_ALL_PREPARED, NO_MARK, NO_NONCE, NO_RECORD (a relayed "abort" without recording
 * it), NO_LAST_PREPARED (a rank that has forgotten says "abort"), NO_LONE_GUARD (the lead aborts alone after it has
 * proposed). */
#ifndef N
#define N 2
#endif
#ifndef MOST_FAULTS
#define MOST_FAULTS 2
#endif
#define LEAD   0
#define IX(r, v) ((r) * 2 + (v) - 1)

#define IDLE          0
#define PREPARED      1
#define PROPOSED      2
#define UNANSWERED    3
#define DECIDED       4
#define APPLYING      5
#define IN_DOUBT      6
#define ASKING        7
#define APPLYING_LATE 8

#define NONE   0
#define COMMIT 1
#define ABORT  2

byte st[N];        /* state */
bool alive[N];     /* the process that began */
byte cur[N];       /* the receive: 1, 2; 0: none has begun */
byte vec[N];       /* the vector that the rank has taken; 0: none */
bool has_p[N], has_q[N]; /* data of the two pairs */
bool has_left[N];  /* it has removed the pairs */
byte serves[N];    /* the version that the program may use, plus 1; 0: none */
byte last_prepared[N], refused[N];
byte note[N];      /* the mark of the store when it became prepared */
byte busy;          /* a rank that is applying, plus 1: nobody else takes a step meanwhile, which changes nothing */

byte out[2 * N];      /* what senders have heard of each receive */
byte prepared[2 * N]; /* with which vector the rank was prepared */
byte known[2 * N];    /* outcomes that the rank remembers */
byte heard[2 * N];    /* messages and replies that it has got */
byte told[2 * N];     /* at the lead: PREPARED, with this vector */
byte told_mark[2 * N];
byte unsent[N];       /* at the lead: a decision that it has to send, about ... */
byte unsent_about[N]; /* ... this receive */
byte lead_vec[2];     /* that the lead has told the ranks */

bool request_commit[2 * N], request_abort[2 * N]; /* on the way to the store */
byte request_mark[2 * N];
byte reply[2 * N];    /* on the way from it */
byte decision[2];     /* in the store */
byte mark = 1;
bool is_stopped;
byte asks[N];         /* the receive that the rank has asked the others about; bits in answered */
bool answered[N * N];
byte nfaults;

#define V(r)  IX(r, cur[r])
#define MAY_GIVE_UP (nfaults > 0)

inline check(v) {
    d_step {
        c_i = 0;
        c_n = 0;
        do
        :: c_i < N ->
            if
            :: out[IX(c_i, v)] == COMMIT -> c_n = c_n | 1
            :: out[IX(c_i, v)] == ABORT -> c_n = c_n | 2
            :: else
            fi;
            c_i++
        :: else -> break
        od;
        assert(c_n != 3);
        c_i = 0;
        do
        :: c_i < N ->
            assert(!(c_n & 1) || (prepared[IX(c_i, v)] != 0 && prepared[IX(c_i, v)] == prepared[IX(0, v)]));
            c_i++
        :: else -> break
        od;
        c_i = 0;
        c_n = 0
    }
}

#if N == 2
#define ALL_TOLD(v) (told[IX(0, v)] && told[IX(0, v)] == told[IX(1, v)] && told_mark[IX(0, v)] == told_mark[IX(1, v)])
#define HAVE_TOLD(v) (told[IX(0, v)] && told[IX(1, v)])
#else
#define ALL_TOLD(v) (told[IX(0, v)] && told[IX(0, v)] == told[IX(1, v)] && told[IX(0, v)] == told[IX(2, v)] &&         \
                     told_mark[IX(0, v)] == told_mark[IX(1, v)] && told_mark[IX(0, v)] == told_mark[IX(2, v)])
#define HAVE_TOLD(v) (told[IX(0, v)] && told[IX(1, v)] && told[IX(2, v)])
#endif

/* ---- Inputs ---- */
#define IN_HAS_ALL(r)      (cur[r] > 0 && !has_left[r] && out[V(r)] == NONE && has_p[r] && has_q[r] && refused[r] < cur[r])
#define IN_HEARS_COMMIT(r) (heard[V(r)] == COMMIT)
#define IN_HEARS_ABORT(r)  (heard[V(r)] == ABORT)
#define IN_ABORTS_ALONE(r) (r == LEAD && (MAY_GIVE_UP || (HAVE_TOLD(cur[r]) && !ALL_TOLD(cur[r]))))
#ifdef NO_ALL_PREPARED
#define IN_ALL_PREPARED(r) (r == LEAD)
#else
#define IN_ALL_PREPARED(r) (r == LEAD && ALL_TOLD(cur[r]))
#endif
#define IN_GIVES_UP(r)      (r != LEAD && MAY_GIVE_UP)
#define IN_NO_ANSWER(r)     (is_stopped || mark != note[r])
#define IN_ASKS_AGAIN(r)    (!is_stopped && mark == note[r])
#define IN_IS_OVER(r)       (MAY_GIVE_UP)
#define IN_MAY_APPLY(r)     (true)
#define IN_HAS_APPLIED(r)   (true)
#define IN_LACKS_MEMORY(r)  (false)
#define IN_CANNOT_APPLY(r)  (false)
#define IN_LEARNS_COMMIT(r) (heard[V(r)] == COMMIT)
#define IN_LEARNS_ABORT(r)  (heard[V(r)] == ABORT)
#define IN_WANTS_TO_KNOW(r) (heard[V(r)] == NONE && !is_stopped && mark == note[r])
#define IN_HAS_ANSWER(r)    (heard[V(r)] != NONE || is_stopped || mark != note[r])
#define IN_IS_REMOVED(r)    (mark != note[r] && !is_stopped)

/* ---- Outputs ---- */
inline send_all(r, what) {
    d_step {
        if
        :: r == LEAD ->
            c_i = 1;
            do
            :: c_i < N -> unsent[c_i] = what; unsent_about[c_i] = cur[r]; c_i++
            :: else -> break
            od;
            c_i = 0
        :: else
        fi
    }
}
inline ask_all(r) {
    d_step {
        asks[r] = cur[r];
        c_i = 0;
        do
        :: c_i < N -> answered[r * N + c_i] = (c_i == r); c_i++
        :: else -> break
        od;
        c_i = 0
    }
}
inline request(r, what) {
    request_mark[V(r)] = note[r];
    if
    :: what == COMMIT -> request_commit[V(r)] = true
    :: else -> request_abort[V(r)] = true
    fi
}
/* What no step reads any more is cleared, so that states are equal. */
inline clear(r) {
    d_step {
        vec[r] = 0;
        has_p[r] = false;
        has_q[r] = false;
        note[r] = 0;
        asks[r] = 0;
        c_i = 0;
        do
        :: c_i < N ->
            answered[r * N + c_i] = false;
            if
            :: r == LEAD -> told[IX(c_i, cur[r])] = 0; told_mark[IX(c_i, cur[r])] = 0
            :: else
            fi;
            c_i++
        :: else -> break
        od;
        c_i = 0;
        heard[V(r)] = NONE;
        reply[V(r)] = NONE
    }
}
/* The lead is still to decide about the receive. */
#define LEAD_LISTENS(v) (alive[LEAD] && (cur[LEAD] < v || (cur[LEAD] == v && out[IX(LEAD, v)] == NONE)))
inline OUT_TELL_LEAD(r) {
    note[r] = mark;
    last_prepared[r] = cur[r];
    prepared[V(r)] = vec[r];
    if
    :: LEAD_LISTENS(cur[r]) -> told[V(r)] = vec[r]; told_mark[V(r)] = mark
    :: else
    fi
}
inline OUT_PASS_ON(r) { known[V(r)] = COMMIT; send_all(r, COMMIT) }
inline OUT_DISCARD(r) { known[V(r)] = ABORT; out[V(r)] = ABORT; send_all(r, ABORT); check(cur[r]); clear(r) }
inline OUT_PROPOSE_COMMIT(r) { request(r, COMMIT) }
inline OUT_PROPOSE_ABORT(r) { request(r, ABORT) }
inline OUT_PROPOSE_AGAIN(r) {
    if
    :: r == LEAD -> request(r, COMMIT)
    :: else -> request(r, ABORT)
    fi
}
inline OUT_ASK_PEERS(r) { ask_all(r) }
inline OUT_ASK_ALL(r) { ask_all(r); request(r, ABORT) }
inline OUT_LEAVE_UNKNOWN(r) { serves[r] = 0 }
inline OUT_APPLY(r) { known[V(r)] = COMMIT }
inline OUT_FINISH(r) {
    out[V(r)] = COMMIT;
    serves[r] = cur[r] + 1;
    if
    :: r == LEAD && cur[r] == 2 -> decision[0] = NONE /* no rank asks for it any more */
    :: else
    fi;
    check(cur[r]);
    clear(r)
}
inline OUT_KEEP(r) { known[V(r)] = ABORT; out[V(r)] = ABORT; serves[r] = cur[r]; check(cur[r]); clear(r) }
inline OUT_FAIL(r) { skip }
inline OUT_NOTHING(r) {
    if
    :: st[r] == IDLE -> has_left[r] = true; clear(r) /* the pairs were removed */
    :: else
    fi
}

/* ---- Relayed answers ---- */
#ifdef NO_NONCE
#define HAS_NONCE(me) (true) /* another process has got the number of one that died */
#else
#define HAS_NONCE(me) (alive[me])
#endif
#define asked_by(me, who) (me != who && asks[who] != 0 && alive[who] && !answered[who * N + me] && HAS_NONCE(me))

inline say(me, who, what) {
    if
    :: heard[IX(who, asks[who])] == NONE && out[IX(who, asks[who])] == NONE -> heard[IX(who, asks[who])] = what
    :: else
    fi
}
inline answer(me, who) {
    answered[who * N + me] = true;
    if
    :: !alive[me] -> say(me, who, ABORT) /* another process with this rank's number has never been prepared */
    :: alive[me] && known[IX(me, asks[who])] != NONE -> say(me, who, known[IX(me, asks[who])])
#ifdef NO_LAST_PREPARED
    :: alive[me] && known[IX(me, asks[who])] == NONE && (cur[me] != asks[who] || st[me] == IDLE) ->
#else
    :: alive[me] && known[IX(me, asks[who])] == NONE && last_prepared[me] < asks[who] ->
#endif
#ifndef NO_RECORD
        refused[me] = (refused[me] > asks[who] -> refused[me] : asks[who]);
#endif
        say(me, who, ABORT)
    :: else /* it does not know */
    fi
}

/* ---- Ranks ---- */
/* What a pair's data wait for is seen by the rank alone, and having all of it does not make a rank take the next step:
 * with three ranks, all data arrive in one step, which leaves out states, but no order of what ranks tell each other. */
#if N > 2
#define ARRIVE_AT_ONCE(me) has_p[me] = true; has_q[me] = true
#else
#define ARRIVE_AT_ONCE(me) skip
#endif
#define TRANSITION(state, input, next, output)                                                                         \
    :: atomic { (busy == 0 || busy == me + 1) && alive[me] && st[me] == state && IN_##input(me) ->                     \
                st[me] = next; OUT_##output(me); assert(st[me] < IN_DOUBT || serves[me] == 0);                         \
                busy = (st[me] == DECIDED || st[me] == APPLYING || st[me] == APPLYING_LATE -> me + 1 : 0) }

proctype rank(byte me) {
    byte c_i, c_n;
end:
    do
#include "../../src/bus/commit_table.h"
#ifdef NO_LONE_GUARD
    :: atomic { busy == 0 && alive[me] && me == LEAD && st[me] == UNANSWERED && MAY_GIVE_UP -> st[me] = IDLE; OUT_DISCARD(me) }
#endif
    /* a receive begins, and the rank may forget how the one before ended; the lead fixes the vector */
    :: atomic { busy == 0 && alive[me] && !has_left[me] && st[me] == IDLE && cur[me] < 2 &&
                (cur[me] == 0 || out[V(me)] != NONE) ->
                if
                :: cur[me] == 1 -> known[IX(me, 1)] = NONE
                :: true
                fi;
                cur[me]++;
                if
                :: me == LEAD -> vec[me] = 1; lead_vec[cur[me] - 1] = 1; ARRIVE_AT_ONCE(me)
                :: else
                fi }
    :: atomic { busy == 0 && alive[me] && me != LEAD && st[me] == IDLE && cur[me] > 0 && vec[me] == 0 && out[V(me)] == NONE &&
                lead_vec[cur[me] - 1] != 0 && !has_left[me] -> vec[me] = lead_vec[cur[me] - 1]; ARRIVE_AT_ONCE(me) }
    :: atomic { busy == 0 && alive[me] && st[me] == IDLE && vec[me] != 0 && !has_p[me] -> has_p[me] = true }
    :: atomic { busy == 0 && alive[me] && st[me] == IDLE && has_p[me] && !has_q[me] -> has_q[me] = true }
    /* a rank that is not prepared aborts on its own, or hears that it has to */
    :: atomic { busy == 0 && alive[me] && st[me] == IDLE && cur[me] > 0 && out[V(me)] == NONE && !has_left[me] &&
                (MAY_GIVE_UP || heard[V(me)] == ABORT) ->
                out[V(me)] = ABORT; send_all(me, ABORT);
                refused[me] = (refused[me] > cur[me] -> refused[me] : cur[me]); check(cur[me]); clear(me) }
    /* messages of the lead, one by one */
    :: atomic { busy == 0 && alive[me] && me == LEAD && unsent[1] != NONE ->
                if
                :: heard[IX(1, unsent_about[1])] == NONE && out[IX(1, unsent_about[1])] == NONE && alive[1] -> heard[IX(1, unsent_about[1])] = unsent[1]
                :: else
                fi;
                unsent[1] = NONE; unsent_about[1] = 0 }
#if N > 2
    :: atomic { busy == 0 && alive[me] && me == LEAD && unsent[2] != NONE ->
                if
                :: heard[IX(2, unsent_about[2])] == NONE && out[IX(2, unsent_about[2])] == NONE && alive[2] -> heard[IX(2, unsent_about[2])] = unsent[2]
                :: else
                fi;
                unsent[2] = NONE; unsent_about[2] = 0 }
#endif
    /* the store's reply */
    :: atomic { busy == 0 && alive[me] && cur[me] > 0 && reply[V(me)] != NONE ->
                if
                :: heard[V(me)] == NONE && st[me] != IDLE -> heard[V(me)] = reply[V(me)]
                :: else
                fi;
                reply[V(me)] = NONE }
    /* the answer to another rank that has asked */
    :: atomic { busy == 0 && asked_by(me, 0) -> answer(me, 0) }
    :: atomic { busy == 0 && asked_by(me, 1) -> answer(me, 1) }
#if N > 2
    :: atomic { busy == 0 && asked_by(me, 2) -> answer(me, 2) }
#endif
    od
}

/* ---- The store ---- */
#ifdef NO_MARK
#define HAS_MARK(i) (true)
#else
#define HAS_MARK(i) (request_mark[i] == mark)
#endif

inline apply(i, v, what) {
    if
    :: HAS_MARK(i) ->
        if
        :: decision[v - 1] == NONE -> decision[v - 1] = what
        :: else
        fi;
        if
        :: alive[(i) / 2] && cur[(i) / 2] == v && out[i] == NONE && st[(i) / 2] != IDLE -> reply[i] = decision[v - 1]
        :: else
        fi
    :: else
    fi;
    if
    :: !request_commit[i] && !request_abort[i] -> request_mark[i] = 0
    :: else
    fi
}

#define SERVE(i, v)                                                                                                    \
    :: atomic { busy == 0 && !is_stopped && request_commit[i] -> request_commit[i] = false; apply(i, v, COMMIT) }                   \
    :: atomic { busy == 0 && !is_stopped && request_abort[i] -> request_abort[i] = false; apply(i, v, ABORT) }

proctype store() {
end:
    do
    SERVE(0, 1)
    SERVE(1, 2)
    SERVE(2, 1)
    SERVE(3, 2)
#if N > 2
    SERVE(4, 1)
    SERVE(5, 2)
#endif
    :: atomic { busy == 0 && is_stopped -> is_stopped = false }
    od
}

/* ---- Faults ---- */
inline die(r) {
    st[r] = IDLE;
    serves[r] = 0;
    last_prepared[r] = 0;
    refused[r] = 0;
    known[IX(r, 1)] = NONE;
    known[IX(r, 2)] = NONE;
    if
    :: cur[r] > 0 -> clear(r)
    :: else
    fi;
    cur[r] = 0;
    if
    :: r == LEAD ->
        unsent[1] = NONE;
        unsent_about[1] = 0;
#if N > 2
        unsent[2] = NONE;
        unsent_about[2] = 0
#endif
    :: else
    fi
}
#define KILL(r)    :: atomic { busy == 0 && nfaults < MOST_FAULTS && alive[r] -> alive[r] = false; die(r); nfaults++ }
#define DIFFER(r)                                                                                                      \
    :: atomic { busy == 0 && nfaults < MOST_FAULTS && alive[r] && st[r] == IDLE && vec[r] != 0 -> vec[r] = 3 - vec[r]; nfaults++ }

proctype faults() {
    byte c_i;
    do
    KILL(0)
    KILL(1)
    DIFFER(1)
#if N > 2
    KILL(2)
    DIFFER(2)
#endif
    :: atomic { busy == 0 && nfaults < MOST_FAULTS && !is_stopped -> is_stopped = true; nfaults++ }
    :: atomic { busy == 0 && nfaults < MOST_FAULTS -> mark++; decision[0] = NONE; decision[1] = NONE; nfaults++ }
    :: atomic { busy == 0 && nfaults < MOST_FAULTS -> nfaults++ } /* a rank has a reason to abort */
    :: break
    od
}

/* ---- When nothing can happen any more ---- */
#define FINISHED(r) (!alive[r] || has_left[r] || (cur[r] == 2 && st[r] == IDLE && out[IX(r, 2)] != NONE))

active proctype start() {
    atomic {
        byte i = 0;
        do
        :: i < N -> alive[i] = true; serves[i] = 1; i++
        :: else -> break
        od;
        i = 0;
        run rank(0);
        run rank(1);
#if N > 2
        run rank(2);
#endif
        run store();
        run faults()
    }
end:
    timeout ->
        assert(nfaults > 0 || (out[IX(0, 2)] == COMMIT && out[IX(1, 2)] == COMMIT && out[IX(0, 1)] == COMMIT &&
                               out[IX(1, 1)] == COMMIT));
        assert(mark > 1 || (FINISHED(0) && FINISHED(1)));
#if N > 2
        assert(mark > 1 || FINISHED(2));
#endif
        skip
}
