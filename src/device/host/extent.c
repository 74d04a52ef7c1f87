/* The tree of extents: a treap, in which each node knows the longest offered extent below it. */
#include "device/host/extent.h"

static size_t longest(const tb__extent *node) {
    return node ? node->longest : 0;
}

static void settle(tb__extent *node) {
    size_t most = node->is_offered ? node->nbytes : 0;
    if (longest(node->left) > most)
        most = longest(node->left);
    if (longest(node->right) > most)
        most = longest(node->right);
    node->longest = most;
}

/* Cuts a tree into what starts below the address and the rest. */
static void split(tb__extent *node, uintptr_t start, tb__extent **below, tb__extent **rest) {
    if (!node) {
        *below = *rest = NULL;
        return;
    }
    if (node->start < start) {
        split(node->right, start, &node->right, rest);
        *below = node;
    } else {
        split(node->left, start, below, &node->left);
        *rest = node;
    }
    settle(node);
}

/* All of `a` starts below all of `b`. */
static tb__extent *join(tb__extent *a, tb__extent *b) {
    if (!a || !b)
        return a ? a : b;
    tb__extent *top = a->priority >= b->priority ? a : b;
    if (top == a)
        a->right = join(a->right, b);
    else
        b->left = join(a, b->left);
    settle(top);
    return top;
}

void tb__extents_add(tb__extents *extents, tb__extent *extent) {
    /* Any generator will do; this one is xorshift, which must not be at zero. */
    uint32_t r = extents->random ? extents->random : 2463534242U;
    r ^= r << 13;
    r ^= r >> 17;
    r ^= r << 5;
    extents->random = extent->priority = r;
    extent->left = extent->right = NULL;
    settle(extent);
    tb__extent *below, *rest;
    split(extents->root, extent->start, &below, &rest);
    extents->root = join(join(below, extent), rest);
}

void tb__extents_remove(tb__extents *extents, tb__extent *extent) {
    tb__extent *below, *it, *above;
    split(extents->root, extent->start, &below, &it);
    split(it, extent->start + 1, &it, &above);
    extents->root = join(below, above);
}

static void update(tb__extent *node, const tb__extent *extent) {
    if (node != extent)
        update(extent->start < node->start ? node->left : node->right, extent);
    settle(node);
}

void tb__extents_update(tb__extents *extents, const tb__extent *extent) {
    update(extents->root, extent);
}

tb__extent *tb__extents_at(const tb__extents *extents, uintptr_t address) {
    tb__extent *found = NULL;
    for (tb__extent *node = extents->root; node;) {
        if (node->start <= address)
            found = node;
        node = node->start <= address ? node->right : node->left;
    }
    return found;
}

tb__extent *tb__extents_fit(const tb__extents *extents, size_t nbytes) {
    tb__extent *node = extents->root;
    if (longest(node) < nbytes)
        return NULL;
    for (;;) {
        if (longest(node->left) >= nbytes)
            node = node->left;
        else if (node->is_offered && node->nbytes >= nbytes)
            return node;
        else
            node = node->right;
    }
}
