/* The tree of extents: a treap, in which each node knows the longest offered extent below it. */
#include "device/host/extent.h"

static size_t longest_of(const tb__extent *node) {
    return node ? node->longest : 0;
}

static void update_longest(tb__extent *node) {
    size_t most = node->is_offered ? node->nbytes : 0;
    if (longest_of(node->left) > most)
        most = longest_of(node->left);
    if (longest_of(node->right) > most)
        most = longest_of(node->right);
    node->longest = most;
}

/* Cuts a tree into what starts below the address and the rest. */
static void split_tree(tb__extent *node, uintptr_t start, tb__extent **below, tb__extent **rest) {
    if (!node) {
        *below = *rest = NULL;
        return;
    }
    if (node->start < start) {
        split_tree(node->right, start, &node->right, rest);
        *below = node;
    } else {
        split_tree(node->left, start, below, &node->left);
        *rest = node;
    }
    update_longest(node);
}

/* All of `a` starts below all of `b`. */
static tb__extent *join_trees(tb__extent *a, tb__extent *b) {
    if (!a || !b)
        return a ? a : b;
    tb__extent *top = a->priority >= b->priority ? a : b;
    if (top == a)
        a->right = join_trees(a->right, b);
    else
        b->left = join_trees(a, b->left);
    update_longest(top);
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
    update_longest(extent);
    tb__extent *below, *rest;
    split_tree(extents->root, extent->start, &below, &rest);
    extents->root = join_trees(join_trees(below, extent), rest);
}

void tb__extents_remove(tb__extents *extents, tb__extent *extent) {
    tb__extent *below, *it, *above;
    split_tree(extents->root, extent->start, &below, &it);
    split_tree(it, extent->start + 1, &it, &above);
    extents->root = join_trees(below, above);
}

static void update_path(tb__extent *node, const tb__extent *extent) {
    if (node != extent)
        update_path(extent->start < node->start ? node->left : node->right, extent);
    update_longest(node);
}

void tb__extents_update(tb__extents *extents, const tb__extent *extent) {
    update_path(extents->root, extent);
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
    if (longest_of(node) < nbytes)
        return NULL;
    for (;;) {
        if (longest_of(node->left) >= nbytes)
            node = node->left;
        else if (node->is_offered && node->nbytes >= nbytes)
            return node;
        else
            node = node->right;
    }
}
