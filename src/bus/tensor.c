/* Adds a tensor: applies its view to the stored tensor, binds this rank's part, and finds its padding. */
#include "bus/exchange.h"

#include "device/host/memory.h"
#include "layout/layout.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void tb__added_tensor_fini(tb__added_tensor *t) {
    free(t->name);
    free(t->layout);
    free(t->padding);
    free(t->encode);
    free(t->scale_group);
}

static tb_status check_layout_seats(const tb_pair *pair, const tb_layout *layout) {
    int32_t beyond = tb__layout_rank_from(layout, pair->size);
    if (beyond == TB_NO_RANK)
        return TB_OK;
    return tb__fail(TB_INVALID, "its layout names rank %" PRId32 " of group '%s', which has %" PRId32, beyond,
                    pair->sides[pair->side].group, pair->size);
}

static tb_status bind_nothing(const tb_tensor *given, int ndim, tb_binding *out) {
    tb_shape nothing = {.ndim = ndim ? ndim : 1}; /* a scalar always has an element; a row of none does not */
    return tb_binding_contiguous(given->data, 0, given->dtype, &nothing, out);
}

/* Finds the device of the memory, and checks that there are so many bytes. */
static tb_status locate(const tb_world *world, const void *address, size_t nbytes, tb__device **out,
                        tb__memory *memory) {
    tb__device *device = *out = tb__loop_find_memory(world->loop, address, nbytes, memory);
    if (device->ops != &tb__host_device_ops)
        return TB_OK;
    bool is_shareable = memory->is_shareable; /* or it is not all in one memory */
    device = *out = tb__loop_find_memory(world->loop, address, 1, memory);
    memory->is_shareable = is_shareable && device->ops == &tb__host_device_ops;
    return device->ops == &tb__host_device_ops ? tb__memory_check_mapped(address, nbytes)
                                               : tb__device_check_extent(device, address, nbytes);
}

/* Finds the device of the memory, which must be the one that `given` names. */
static tb_status find_device(tb__added_tensor *t, const tb_tensor *given, const void *address, size_t nbytes) {
    const tb_world *world = t->pair->world;
    if (nbytes == 0)
        return TB_OK;
    TB_TRY(tb__world_check_memory(world, given->memory, address, nbytes));
    tb__memory memory;
    tb__device *device;
    TB_TRY(locate(world, address, nbytes, &device, &memory));
    if (!t->memory_kind) /* the data comes before scales */
        t->memory_kind = tb__device_memory_kind(device, &memory);
    if (device->ops == &tb__host_device_ops) {
        t->is_on_host = true;
    } else {
        t->device = device;
        t->unit = memory.index;
    }
    return TB_OK;
}

/* Binds this rank's part of the stored tensor. */
static tb_status bind_storage(tb__added_tensor *t, const tb_tensor *given, const tb_shape *shape) {
    tb_binding *out = &t->binding;
    TB_TRY(tb_binding_contiguous(given->data, 0, given->dtype, shape, out));
    if (given->strides)
        memcpy(out->strides, given->strides, (size_t)shape->ndim * sizeof *given->strides);
    int64_t count;
    TB_TRY(tb_shape_size(shape, given->dtype, &count, NULL));
    if (count > 0 && !given->data)
        return tb__fail(TB_INVALID, "its data is NULL, but this rank holds %" PRId64 " elements of it", count);
    uintptr_t first, last;
    TB_TRY(tb__binding_span(out, &first, &last));
    TB_TRY(find_device(t, given, (void *)first, last - first));
    TB_TRY(find_device(t, given, given->scales, given->scales != NULL));
    return find_device(t, given, given->scale, given->scale != NULL);
}

/* The viewed layout is always sent, since the pair's layout is that of the storage. */
static tb_status apply_view(tb__added_tensor *t, const tb_view *view, const tb_shape *stored, const tb_layout *layout) {
    tb_layout *viewed;
    char *text;
    TB_TRY(tb_view_apply(view, stored, layout, &t->shape, &viewed));
    tb_status status = tb_layout_format(viewed, &text);
    tb_layout_destroy(viewed);
    TB_TRY(status);
    free(t->layout);
    t->layout = text;
    return TB_OK;
}

/* Initialises quantised storage; `mine` is this rank's shape of it. */
static tb_status init_encoded(tb__added_tensor *t, const tb_tensor *given, const tb_shape *mine) {
    tb__encoding encoding;
    TB_TRY(tb__encoding_parse(t->encode, &encoding));
    if (given->strides)
        return tb__fail(TB_INVALID, "it is %s, and can't have strides", t->encode);
    TB_TRY(tb__encoded_init(&encoding, mine, given->data, given->scales, given->scale, &t->binding, &t->encoded));
    if (given->dtype != t->encoded.size.data_dtype)
        return tb__fail(TB_INVALID, "its data is %s, but that of %s is %s", tb_dtype_name(given->dtype), t->encode,
                        tb_dtype_name(t->encoded.size.data_dtype));
    if (t->npadding)
        return tb__fail(TB_REFUSED, "it is %s, and can't have padding", t->encode);
    return TB_OK;
}

static tb_status init_binding(tb__added_tensor *t, const tb_tensor *given, const tb_layout *layout) {
    int32_t seat = t->pair->index;
    bool is_outside = tb_layout_index_of(layout, seat) < 0;
    tb_shape stored = t->shape;
    tb_local local;
    TB_TRY(tb_layout_local(layout, &stored, seat, &local));
    tb_shape mine = local.shape;
    mine.ndim = stored.ndim;
    tb_local_fini(&local);
    TB_TRY(check_layout_seats(t->pair, layout));
    if (!is_outside)
        TB_TRY(bind_storage(t, given, &mine));
    tb_view *view = NULL;
    tb_status status = given->view ? tb_view_parse(given->view, &view) : TB_OK;
    if (status == TB_OK && view)
        status = apply_view(t, view, &stored, layout);
    if (status == TB_OK && is_outside) {
        status = bind_nothing(given, t->shape.ndim, &t->binding);
    } else if (status == TB_OK && view) {
        tb_binding storage = t->binding;
        status = tb_view_bind(view, &stored, layout, seat, &storage, &t->binding);
        if (status == TB_OK)
            status = tb_view_padding(view, &stored, layout, seat, &storage, &t->padding, &t->npadding);
    }
    tb_view_destroy(view);
    return status == TB_OK && t->encode && !is_outside ? init_encoded(t, given, &mine) : status;
}

static tb_status set_conversion(tb__added_tensor *t, const char *name, const tb_tensor *given,
                                const tb_transform *transform) {
    tb__encoding encoding; /* checked on ranks without a part, too */
    t->is_transformed =
        transform && (!transform->should_transform || transform->should_transform(transform->arg, name));
    t->is_whole = t->is_transformed && transform->whole;
    if (given->encode) {
        TB_TRY(tb__encoding_parse(given->encode, &encoding));
        if (given->scale_group && *given->scale_group && !tb__encoding_is_global(&encoding))
            return tb__fail(TB_INVALID, "%.60s has no scale that scale group '%.100s' could have in common",
                            given->encode, given->scale_group);
        t->encode = tb__strdup(given->encode);
        t->scale_group = given->scale_group && *given->scale_group ? tb__strdup(given->scale_group) : NULL;
        if (!t->encode || (given->scale_group && *given->scale_group && !t->scale_group))
            return TB_NO_MEMORY;
    } else if (given->scales || given->scale || given->scale_group) {
        return tb__fail(TB_INVALID, "it has scales but no encoding");
    }
    return TB_OK;
}

/* Layouts are compared as text, so they are stored in canonical form. */
static tb_status set_tensor_layout(tb__added_tensor *t, const tb_tensor *given, tb_layout **out) {
    tb_layout *layout;
    const char *pairs = t->pair->sides[t->pair->side].layout;
    TB_TRY(given->layout ? tb_layout_parse(given->layout, &layout)
                         : tb__pair_layout_parse(pairs, t->pair->index, &layout));
    tb_status status = given->layout || !tb__pair_has_layout(pairs) ? tb_layout_format(layout, &t->layout) : TB_OK;
    if (status != TB_OK) {
        tb_layout_destroy(layout);
        return status;
    }
    *out = layout;
    return TB_OK;
}

/* A seat's own tensor has its seat in its name. */
static tb_status set_name(tb__added_tensor *t, const char *name, bool is_own) {
    size_t room = strlen(name) + 16;
    t->name = tb__malloc(room, 1);
    if (t->name)
        snprintf(t->name, room, is_own ? "%s@%" PRId32 : "%s", name, t->pair->index);
    return t->name ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__added_tensor_init(tb__added_tensor *t, tb_pair *pair, const char *name, const tb_tensor *given,
                                const tb_transform *transform) {
    if (given->ndim < 0 || given->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a tensor has 0 to %d dimensions, not %d", TB_MAX_DIMS, given->ndim);
    *t = (tb__added_tensor){.pair = pair,
                            .dtype = given->dtype,
                            .wire_dtype = given->wire_dtype,
                            .group = given->group,
                            .data = given->data};
    t->shape.ndim = given->ndim;
    memcpy(t->shape.dim, given->shape, (size_t)given->ndim * sizeof *given->shape);
    if (given->wire_dtype != TB_DTYPE_NONE && !tb_dtype_bits(given->wire_dtype))
        return tb__fail(TB_INVALID, "its wire_dtype is %d, which is not a dtype", (int)given->wire_dtype);
    if (given->group == UINT32_MAX)
        return tb__fail(TB_INVALID, "groups go up to %" PRIu32, UINT32_MAX - 1);
    TB_TRY(tb_shape_size(&t->shape, t->dtype, NULL, NULL));
    tb_layout *layout; /* in seats */
    TB_TRY(set_tensor_layout(t, given, &layout));
    bool is_own = !given->layout && !tb__pair_has_layout(pair->sides[pair->side].layout);
    tb_status status = set_conversion(t, name, given, transform);
    if (status == TB_OK)
        status = set_name(t, name, is_own);
    if (status == TB_OK)
        status = init_binding(t, given, layout);
    tb_layout_destroy(layout);
    if (status != TB_OK)
        tb__added_tensor_fini(t);
    return status;
}

/* ---- Moved tensors ---------------------------------------------------------------------------------------------- */

static void *shift_address(const void *address, intptr_t by) {
    return (void *)((uintptr_t)address + (uintptr_t)by); // NOLINT(performance-no-int-to-ptr)
}

void tb__added_tensor_shift(tb__added_tensor *t, bool back) {
    intptr_t by = back ? -t->shift : t->shift;
    t->data = shift_address(t->data, by);
    t->binding.base = shift_address(t->binding.base, by);
    for (size_t i = 0; i < t->npadding; i++)
        t->padding[i].base = shift_address(t->padding[i].base, by);
}

static tb_status check_kind(const tb__added_tensor *t, const tb_binding *b) {
    uintptr_t first, last;
    tb__memory memory;
    tb__device *device;
    TB_TRY(tb__binding_span(b, &first, &last));
    if (first == last)
        return TB_OK;
    TB_TRY(locate(t->pair->world, shift_address((const void *)first, t->shift), // NOLINT(performance-no-int-to-ptr)
                  last - first, &device, &memory));
    return tb__device_memory_kind(device, &memory) == t->memory_kind
               ? TB_OK
               : tb__fail(TB_REFUSED, "it has moved to memory of another kind (another device, or memory that can be "
                                      "shared instead of memory that can't); make the batch again");
}

tb_status tb__added_tensor_check_shift(const tb__added_tensor *t) {
    if (t->encode)
        return tb__fail(TB_REFUSED, "it is %s, and can't be bound to other memory; make the batch again", t->encode);
    tb_status status = check_kind(t, &t->binding);
    for (size_t i = 0; i < t->npadding && status == TB_OK; i++)
        status = check_kind(t, &t->padding[i]);
    return status;
}
