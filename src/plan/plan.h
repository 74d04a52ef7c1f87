/* Plans inside the library.
 *
 * Vocabulary: a *replica set* is the source ranks that hold one cell of the source grid (a class per axis); any of them
 * can send its elements. A *cell* here is where a replica set's cell and a cell of the target grid meet: a product of
 * index lists, which every *receiver* (a rank that holds the target's cell) gets. A replica set's *line* is its (cell,
 * receiver) pairs laid end to end, cells in lexicographic order of target classes and receivers inside. It is cut into
 * as many equal parts as the replica set has members, and each member sends one part. Where hosts are known, and at a
 * Partial source, a cell is on the line once, for all its receivers together; where hosts are known, a short line has
 * fewer parts than members. Because both grids are products, a position on the line is a sum of products of per-axis
 * counts, so that a rank finds its positions without walking the line. */
#ifndef TB_PLAN_PLAN_H
#define TB_PLAN_PLAN_H

#include "layout/layout.h"

struct tb_plan {
    tb_layout *src_layout, *dst_layout;
    tb_shape shape;
    tb_dtype dtype;
    tb__grid src, dst;
    bool meshes_overlap; /* some rank is in both */
    bool unbalanced, whole_rows;
    int32_t *hosts; /* by rank; NULL: not known */
    size_t nhosts;
    uint64_t *target_by_host; /* host << 32 | rank of every target rank, ascending */
    uint64_t rotation_period; /* rotations that differ by this give the same routes */
    bool has_tables;          /* some axis, of either side, is Explicit */
};

struct tb_routes {
    TB_VEC(tb_route) list;
    tb__arena arena;                       /* rank lists of the routes, and scratch memory of tb_plan_routes */
    int32_t *ranks;                        /* rank lists of a compact copy, which has no arena */
    struct tb__replica_set_memory *memory; /* cache of replica_set.c from tensor to tensor; NULL until needed */
    tb__wide max_slice;                    /* elements; see tb_plan_stats */
};

/* Memory in bytes; layouts, which may be shared, count in full. */
size_t tb__plan_nbytes(const tb_plan *plan);
size_t tb__routes_nbytes(const tb_routes *routes);

/* Where cells count once, a line has one part per so many bytes, and at most one per member. The same on all ranks;
 * tests may change it. */
extern int64_t tb__min_part_nbytes;

/* Elements on the line of the replica set with these source classes, and its members. */
tb_status tb__plan_line(const tb_plan *plan, const int32_t *classes, tb_routes *scratch, tb__wide *line,
                        int64_t *nmembers);

void tb__replica_set_memory_destroy(struct tb__replica_set_memory *memory);

/* For each route, the index of its box among all boxes of its first target, by offset; ids are made from it. The array
 * has one element per route, and the caller frees it. */
tb_status tb__plan_number(const tb_plan *plan, uint64_t rotation, const tb_routes *routes, uint32_t **out);

/* Sets the time stamp of entries that are used from now on. */
void tb__plan_cache_set_time(tb_plan_cache *cache, uint64_t time);
/* The bytes of all plans and routes, and the oldest time stamp (UINT64_MAX: the cache is empty). */
size_t tb__plan_cache_nbytes(const tb_plan_cache *cache);
uint64_t tb__plan_cache_oldest(const tb_plan_cache *cache);
/* Frees entries with this time stamp or an older one, which must not be in use; returns the number of plans. */
size_t tb__plan_cache_drop(tb_plan_cache *cache, uint64_t time);

/* As tb_plan_cache_routes, with the numbers of the routes. */
tb_status tb__plan_cache_numbered(tb_plan_cache *cache, const tb_plan *plan, int32_t rank, uint64_t rotation,
                                  const tb_routes **routes, const uint32_t **numbers);

#endif
