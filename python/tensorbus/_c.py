"""The C library, as ctypes declares it: constants, structs and functions of the headers tensorbus.h and plan.h.

Everything has its C name. ``tests/test_headers.py`` compares all of it with the headers. Handles of the library are
``c_void_p``. A function that returns a ``tb_status`` raises the exception of that status, with the library's sentence
(see ``_errors.py``), so that callers look at outputs only. ctypes lets go of the GIL in each call.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import os
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from . import _errors

# ---- Constants ------------------------------------------------------------------------------------------------------

TB_MAX_DIMS = 8
TB_MAX_RANKS = 1 << 20
TB_NO_RANK = -1


class tb_status(enum.IntEnum):
    TB_OK = 0
    TB_INVALID = -1
    TB_NO_MEMORY = -2
    TB_TOO_BIG = -3
    TB_REFUSED = -4
    TB_IO = -5
    TB_INTERNAL = -6
    TB_TIMEOUT = -7
    TB_LOST = -8
    TB_DENIED = -9
    TB_CONFLICT = -10
    TB_CANCELLED = -11
    TB_IN_DOUBT = -12
    TB_SUPERSEDED = -13


class tb_log_level(enum.IntEnum):
    TB_LOG_OFF = 0
    TB_LOG_ERROR = 1
    TB_LOG_WARN = 2
    TB_LOG_INFO = 3
    TB_LOG_DEBUG = 4


class tb_commit(enum.IntEnum):
    TB_IN_PLACE = 0
    TB_SHADOW = 1


class tb_event(enum.IntEnum):
    TB_RELEASED = 1
    TB_ARRIVED = 2
    TB_COMMITTED = 4
    TB_DECIDED = 8


class tb_phase(enum.IntEnum):
    TB_PHASE_PLAN = 0
    TB_PHASE_WAIT = 1
    TB_PHASE_PACK = 2
    TB_PHASE_WIRE = 3
    TB_PHASE_UNPACK = 4
    TB_PHASE_COMMIT = 5
    TB_PHASE_COUNT = 6


class tb_chunk_mode(enum.IntEnum):
    TB_P2P = 0
    TB_BROADCAST = 1
    TB_LOCAL = 2
    TB_NONE = 3


class tb_reduce_op(enum.IntEnum):
    TB_SUM = 0
    TB_AVG = 1
    TB_MIN = 2
    TB_MAX = 3
    TB_PRODUCT = 4


class tb_bucket_step(enum.IntEnum):
    TB_BUCKET_PREPARED = 0
    TB_BUCKET_LAUNCHED = 1
    TB_BUCKET_COMPLETE = 2
    TB_BUCKET_FINALISED = 3


# ---- Structs --------------------------------------------------------------------------------------------------------

Dims = c_int64 * TB_MAX_DIMS


class _Sized(Structure):
    """A struct that begins with ``size``, which tells the library which fields it has."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


class tb_shape(Structure):
    _fields_ = [("ndim", c_int), ("dim", Dims)]


class tb_world_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("token", c_char_p),
        ("timeout_ms", c_int),
        ("transport", c_char_p),
        ("workers", c_int),
        ("manual", c_bool),
        ("host", c_char_p),
        ("plan_bytes", c_int64),
        ("name", c_char_p),
    ]


class tb_pair_opts(_Sized):
    _fields_ = [("size", c_size_t), ("group", c_char_p), ("timeout_ms", c_int), ("no_wait", c_bool)]


class tb_tie(Structure):
    _fields_ = [("name", c_char_p), ("canonical", c_char_p)]


class tb_rebinding(Structure):
    _fields_ = [("pair", c_void_p), ("name", c_char_p), ("data", c_void_p)]


class tb_batch_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("bucket_size", c_int64),
        ("staging_bytes", c_int64),
        ("max_in_flight", c_uint32),
        ("group_window", c_uint32),
        ("staged", c_bool),
        ("snapshot", c_bool),
        ("ties", POINTER(tb_tie)),
        ("nties", c_size_t),
        ("ignored", POINTER(c_char_p)),
        ("nignored", c_size_t),
        ("transform", c_void_p),
        ("commit", c_int),
        ("checksum", c_bool),
        ("sends", c_bool),
    ]


class tb_tensor(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("data", c_void_p),
        ("dtype", c_int),
        ("ndim", c_int),
        ("shape", Dims),
        ("strides", POINTER(c_int64)),
        ("layout", c_char_p),
        ("wire_dtype", c_int),
        ("group", c_uint32),
        ("view", c_char_p),
        ("encode", c_char_p),
        ("scales", c_void_p),
        ("scale", c_void_p),
        ("scale_group", c_char_p),
        ("memory", c_char_p),
    ]


class tb_batch_state(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("version", c_uint64),
        ("is_mixed", c_bool),
        ("is_torn", c_bool),
        ("transfer_signal", c_bool),
        ("is_in_doubt", c_bool),
    ]


class tb_transfer_state(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("status", c_int),
        ("events", c_uint),
        ("attempt", c_uint64),
        ("bytes_done", c_int64),
        ("bytes_total", c_int64),
        ("groups_done", c_uint32),
        ("groups_total", c_uint32),
        ("seconds", c_double),
        ("phase", c_double * tb_phase.TB_PHASE_COUNT),
        ("version", c_uint64),
    ]


class tb_transfer_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int),
        ("progress", CFUNCTYPE(None, c_void_p, POINTER(tb_transfer_state))),
        ("arg", c_void_p),
        ("group", c_char_p),
        ("committing", CFUNCTYPE(None, c_void_p, c_bool)),
        ("skip_lost", c_bool),
        ("hold", c_bool),
        ("stream", c_void_p),
        ("whole_group", c_bool),
    ]


class tb_copy_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int),
        ("bucket_size", c_int64),
        ("staging_bytes", c_int64),
        ("max_in_flight", c_uint32),
        ("staged", c_bool),
        ("convert_local", c_bool),
    ]


class tb_copy_view(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("data", c_void_p),
        ("dtype", c_int),
        ("ndim", c_int),
        ("shape", Dims),
        ("strides", POINTER(c_int64)),
        ("memory", c_char_p),
    ]


class tb_slice(Structure):
    _fields_ = [("start", Dims), ("length", Dims)]


class tb_reshard_op(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("param", c_char_p),
        ("peer", c_int32),
        ("here", tb_slice),
        ("there", tb_slice),
        ("task_id", c_uint64),
    ]


class tb_reshard_param(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("view", POINTER(tb_copy_view)),
        ("buffer_dtype", c_int),
        ("encode", c_char_p),
        ("scales", c_void_p),
        ("scale", c_void_p),
    ]


class tb_reshard_plan(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("sends", POINTER(tb_reshard_op)),
        ("recvs", POINTER(tb_reshard_op)),
        ("nsends", c_size_t),
        ("nrecvs", c_size_t),
        ("transform", c_void_p),
        ("sources", POINTER(tb_reshard_param)),
        ("targets", POINTER(tb_reshard_param)),
        ("nsources", c_size_t),
        ("ntargets", c_size_t),
    ]


class tb_reshard_counts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("direct", c_size_t),
        ("copied", c_size_t),
        ("transformed", c_size_t),
        ("accumulated", c_size_t),
    ]


class tb_rule(Structure):
    _fields_ = [("match", c_char_p), ("name", c_char_p), ("view", c_char_p)]


class tb_names_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("layer_pattern", c_char_p),
        ("stage", c_int32),
        ("nstages", c_int32),
        ("chunk", c_int32),
        ("nchunks", c_int32),
        ("nlayers", c_int64),
        ("first_layers", POINTER(c_int64)),
        ("expert_pattern", c_char_p),
        ("expert_rank", c_int32),
        ("nexpert_ranks", c_int32),
        ("nexperts", c_int64),
        ("expert_map", POINTER(c_int64)),
        ("nexpert_map", c_size_t),
        ("rules", POINTER(tb_rule)),
        ("nrules", c_size_t),
    ]


class tb_part(Structure):
    _fields_ = [("param", c_size_t), ("name", c_char_p), ("view", c_void_p), ("text", c_char_p)]


class tb_parts(Structure):
    _fields_ = [("count", c_size_t), ("part", POINTER(tb_part))]


class tb_match_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("ties", POINTER(tb_tie)),
        ("nties", c_size_t),
        ("ignored", POINTER(c_char_p)),
        ("nignored", c_size_t),
        ("allow_unmatched", c_bool),
    ]


class tb_match(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("nmatched", c_size_t),
        ("source", POINTER(c_size_t)),
        ("target", POINTER(c_size_t)),
        ("nonly_source", c_size_t),
        ("nonly_target", c_size_t),
        ("only_source", POINTER(c_size_t)),
        ("only_target", POINTER(c_size_t)),
    ]


class tb_segment(Structure):
    _fields_ = [("start", c_int64), ("stop", c_int64)]


class tb_local(Structure):
    _fields_ = [
        ("shape", tb_shape),
        ("nsegments", c_size_t * TB_MAX_DIMS),
        ("segments", POINTER(tb_segment) * TB_MAX_DIMS),
    ]


class tb_plan_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("hosts", POINTER(c_int32)),
        ("nhosts", c_size_t),
        ("unbalanced", c_bool),
        ("whole_rows", c_bool),
    ]


class tb_box(Structure):
    _fields_ = [("start", Dims)]


class tb_route(Structure):
    _fields_ = [
        ("source", c_int32),
        ("ntargets", c_uint32),
        ("targets", POINTER(c_int32)),
        ("ncontributors", c_uint32),
        ("contributors", POINTER(c_int32)),
        ("src_cell", c_uint64),
        ("dst_cell", c_uint64),
        ("nelements", c_int64),
        ("order", c_int64),
        ("len", Dims),
        ("src", tb_box),
        ("dst", tb_box),
    ]


class tb_plan_stats(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("nranks", c_int32),
        ("ranks", POINTER(c_int32)),
        ("send_bytes", POINTER(c_int64)),
        ("recv_bytes", POINTER(c_int64)),
        ("egress_bytes", POINTER(c_int64)),
        ("reduce_bytes", POINTER(c_int64)),
        ("total_bytes", c_int64),
        ("local_bytes", c_int64),
        ("nchunks", c_int64),
        ("max_send", c_int64),
        ("min_max_send", c_int64),
        ("max_slice", c_int64),
    ]


class tb_binding(Structure):
    _fields_ = [("base", c_void_p), ("offset", c_int64), ("dtype", c_int), ("shape", tb_shape), ("strides", Dims)]


class tb_tensor_spec(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("shape", tb_shape),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("src_dtype", c_int),
        ("dst_dtype", c_int),
        ("wire_dtype", c_int),
        ("group", c_uint32),
        ("band", c_int64),
        ("coded", c_bool),
        ("coded_nbytes", c_void_p),
        ("coded_arg", c_void_p),
        ("whole", c_bool),
        ("memory_kind", c_uint64),
    ]


class tb_chunk(Structure):
    _fields_ = [
        ("mode", c_int),
        ("is_source", c_bool),
        ("is_target", c_bool),
        ("is_coded", c_bool),
        ("tensor", c_uint32),
        ("group", c_uint32),
        ("id", c_uint64),
        ("part", c_uint32),
        ("source", c_int32),
        ("ntargets", c_uint32),
        ("targets", POINTER(c_int32)),
        ("ncontributors", c_uint32),
        ("contributors", POINTER(c_int32)),
        ("op", c_int),
        ("divisor", c_uint64),
        ("src_cell", c_uint64),
        ("dst_cell", c_uint64),
        ("ndim", c_int),
        ("len", Dims),
        ("src", tb_box),
        ("dst", tb_box),
        ("order", c_int64),
        ("src_dtype", c_int),
        ("wire_dtype", c_int),
        ("nbytes", c_int64),
        ("is_whole", c_bool),
        ("memory_kind", c_uint64),
    ]


class tb_bucket_entry(Structure):
    _fields_ = [("chunk", c_size_t), ("offset", c_int64), ("nbytes", c_int64)]


class tb_bucket(Structure):
    _fields_ = [
        ("channel", c_size_t),
        ("group", c_uint32),
        ("first_entry", c_size_t),
        ("nentries", c_size_t),
        ("total_bytes", c_int64),
    ]


class tb_channel(Structure):
    _fields_ = [
        ("first_bucket", c_size_t),
        ("nbuckets", c_size_t),
        ("max_in_flight", c_uint32),
        ("via", POINTER(c_int32)),
    ]


class tb_ir(Structure):
    _fields_ = [
        ("rank", c_int32),
        ("bucket_size", c_int64),
        ("ntensors", c_size_t),
        ("names", POINTER(c_char_p)),
        ("nchunks", c_size_t),
        ("nentries", c_size_t),
        ("nbuckets", c_size_t),
        ("nchannels", c_size_t),
        ("chunks", POINTER(tb_chunk)),
        ("entries", POINTER(tb_bucket_entry)),
        ("buckets", POINTER(tb_bucket)),
        ("channels", POINTER(tb_channel)),
    ]


class tb_ir_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("bucket_size", c_int64),
        ("staging_bytes", c_int64),
        ("max_in_flight", c_uint32),
        ("direct", c_bool),
        ("plan", POINTER(tb_plan_opts)),
    ]


class tb_ir_part(_Sized):
    _fields_ = [("size", c_size_t), ("src", POINTER(tb_binding)), ("dst", POINTER(tb_binding))]


class tb_ir_execute_opts(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int),
        ("bus_ranks", c_bool),
        ("progress", CFUNCTYPE(None, c_void_p, c_size_t, c_int)),
        ("arg", c_void_p),
    ]


# ---- Functions ------------------------------------------------------------------------------------------------------

_INT = POINTER(c_int)
_SIZE = POINTER(c_size_t)
_I32 = POINTER(c_int32)
_I64 = POINTER(c_int64)
_U64 = POINTER(c_uint64)
_OUT = POINTER(c_void_p)
_SHAPE = POINTER(tb_shape)
_STATE = POINTER(tb_transfer_state)
_IR = POINTER(POINTER(tb_ir))

# The result (tb_status: checked) and the parameters of each.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "tb_version_string": (c_char_p,),
    "tb_error_detail": (c_char_p,),
    "tb_log_set_fd": (None, c_int, c_int),
    "tb_dtype_name": (c_char_p, c_int),
    "tb_dtype_bits": (c_uint, c_int),
    "tb_dtype_parse": (tb_status, c_char_p, _INT),
    "tb_shape_size": (tb_status, _SHAPE, c_int, _I64, _I64),
    "tb_encode_nbytes": (tb_status, c_char_p, _SHAPE, _SIZE, _SIZE, _SIZE),
    "tb_alloc_on": (tb_status, c_char_p, c_size_t, _OUT),
    "tb_free": (None, c_void_p),
    "tb_call_join": (tb_status, c_char_p, c_char_p, c_int32, c_int32, POINTER(tb_world_opts), _OUT),
    "tb_call_pair": (tb_status, c_void_p, c_char_p, c_char_p, c_char_p, POINTER(tb_pair_opts), _OUT),
    "tb_call_register": (tb_status, c_void_p, c_int, _OUT),
    "tb_call_send": (tb_status, c_void_p, POINTER(tb_transfer_opts), _OUT),
    "tb_call_recv": (tb_status, c_void_p, POINTER(tb_transfer_opts), _OUT),
    "tb_call_fd": (c_int, c_void_p),
    "tb_call_result": (tb_status, c_void_p, _OUT),
    "tb_call_destroy": (None, c_void_p),
    "tb_world_enter": (tb_status, c_void_p, c_char_p, c_int32, c_int32),
    "tb_world_wait": (tb_status, c_void_p, c_char_p, c_int),
    "tb_world_groups": (tb_status, c_void_p, c_int, _OUT),
    "tb_world_destroy": (None, c_void_p),
    "tb_world_seat": (None, c_void_p, POINTER(c_char_p), _I32, _I32),
    "tb_world_rank": (c_int32, c_void_p),
    "tb_world_incarnation": (c_uint64, c_void_p),
    "tb_world_invalidate": (tb_status, c_void_p, c_void_p, c_size_t),
    "tb_world_plan_counters": (None, c_void_p, _U64, _U64),
    "tb_world_plan_bytes": (c_uint64, c_void_p),
    "tb_pair_destroy": (None, c_void_p),
    "tb_batch_create": (tb_status, c_void_p, c_char_p, POINTER(tb_batch_opts), _OUT),
    "tb_batch_add_all": (tb_status, c_void_p, c_void_p, POINTER(c_char_p), POINTER(tb_tensor), c_size_t, _SIZE),
    "tb_batch_add_pair": (tb_status, c_void_p, c_void_p),
    "tb_batch_dump": (tb_status, c_void_p, c_bool, _OUT),
    "tb_batch_remove_pair": (tb_status, c_void_p, c_void_p),
    "tb_batch_rebind": (tb_status, c_void_p, POINTER(tb_rebinding), c_size_t),
    "tb_batch_epoch": (c_uint64, c_void_p),
    "tb_batch_version": (tb_status, c_void_p, c_void_p, _U64, POINTER(c_bool)),
    "tb_batch_query": (tb_status, c_void_p, POINTER(tb_batch_state)),
    "tb_batch_signal": (tb_status, c_void_p, c_char_p, c_uint64, c_int, POINTER(c_bool)),
    "tb_batch_destroy": (None, c_void_p),
    "tb_send": (tb_status, c_void_p, POINTER(tb_transfer_opts), _OUT),
    "tb_recv": (tb_status, c_void_p, POINTER(tb_transfer_opts), _OUT),
    "tb_wait": (tb_status, c_void_p, c_int, c_int),
    "tb_wait_group": (tb_status, c_void_p, c_uint32, c_int),
    "tb_stream_wait": (tb_status, c_void_p, c_int, c_void_p),
    "tb_proceed": (tb_status, c_void_p),
    "tb_transfer_query": (tb_status, c_void_p, _STATE),
    "tb_transfer_pair": (tb_status, c_void_p, c_void_p, _STATE),
    "tb_transfer_fd": (c_int, c_void_p),
    "tb_cancel": (None, c_void_p),
    "tb_transfer_destroy": (None, c_void_p),
    "tb_copy_open": (tb_status, c_void_p, c_char_p, c_char_p, POINTER(tb_copy_opts), _OUT),
    "tb_copy_submit_send": (tb_status, c_void_p, POINTER(tb_copy_view), c_size_t, c_int32, c_uint64),
    "tb_copy_submit_recv": (tb_status, c_void_p, POINTER(tb_copy_view), c_size_t, c_int32, c_uint64),
    "tb_copy_run": (tb_status, c_void_p, c_int),
    "tb_copy_cancel": (None, c_void_p),
    "tb_copy_close": (None, c_void_p),
    "tb_reshard_execute_plan": (tb_status, c_void_p, POINTER(tb_reshard_plan), c_int, POINTER(tb_reshard_counts)),
    "tb_names_create": (tb_status, POINTER(tb_names_opts), _OUT),
    "tb_names_destroy": (None, c_void_p),
    "tb_names_resolve": (tb_status, c_void_p, POINTER(c_char_p), c_size_t, POINTER(tb_parts)),
    "tb_parts_fini": (None, POINTER(tb_parts)),
    "tb_match_names": (
        tb_status,
        POINTER(c_char_p),
        c_size_t,
        POINTER(c_char_p),
        c_size_t,
        POINTER(tb_match_opts),
        POINTER(tb_match),
    ),
    "tb_match_fini": (None, POINTER(tb_match)),
    "tb_view_parse": (tb_status, c_char_p, _OUT),
    "tb_view_destroy": (None, c_void_p),
    "tb_view_apply": (tb_status, c_void_p, _SHAPE, c_void_p, _SHAPE, _OUT),
    "tb_view_bind": (
        tb_status,
        c_void_p,
        _SHAPE,
        c_void_p,
        c_int32,
        POINTER(tb_binding),
        POINTER(tb_binding),
    ),
    "tb_layout_parse": (tb_status, c_char_p, _OUT),
    "tb_layout_destroy": (None, c_void_p),
    "tb_layout_format": (tb_status, c_void_p, _OUT),
    "tb_hash_box": (tb_status, POINTER(tb_binding), _SHAPE, _I64, _U64),
    "tb_hash_part": (tb_status, c_void_p, _SHAPE, c_int32, POINTER(tb_binding), _U64),
    "tb_layout_equal": (c_bool, c_void_p, c_void_p),
    "tb_layout_nranks": (c_int32, c_void_p),
    "tb_layout_rank_at": (c_int32, c_void_p, c_int32),
    "tb_layout_index_of": (c_int32, c_void_p, c_int32),
    "tb_layout_check": (tb_status, c_void_p, _SHAPE),
    "tb_layout_local": (tb_status, c_void_p, _SHAPE, c_int32, POINTER(tb_local)),
    "tb_local_fini": (None, POINTER(tb_local)),
    "tb_plan_create": (tb_status, c_void_p, c_void_p, _SHAPE, c_int, POINTER(tb_plan_opts), _OUT),
    "tb_plan_destroy": (None, c_void_p),
    "tb_routes_create": (tb_status, _OUT),
    "tb_routes_destroy": (None, c_void_p),
    "tb_routes_count": (c_size_t, c_void_p),
    "tb_routes_at": (POINTER(tb_route), c_void_p, c_size_t),
    "tb_route_mode": (c_int, POINTER(tb_route), c_int32),
    "tb_plan_routes": (tb_status, c_void_p, c_int32, c_uint64, c_void_p),
    "tb_plan_check": (tb_status, c_void_p),
    "tb_plan_stats_compute": (tb_status, c_void_p, POINTER(tb_plan_stats)),
    "tb_plan_stats_fini": (None, POINTER(tb_plan_stats)),
    "tb_plan_grids": (None, c_void_p, _SHAPE, _SHAPE),
    "tb_plan_cache_create": (tb_status, _OUT),
    "tb_plan_cache_destroy": (None, c_void_p),
    "tb_ir_create": (tb_status, c_int32, POINTER(tb_tensor_spec), c_size_t, c_void_p, POINTER(tb_ir_opts), _IR),
    "tb_ir_destroy": (None, POINTER(tb_ir)),
    "tb_ir_dump_text": (tb_status, POINTER(tb_ir), _OUT),
    "tb_ir_dump_json": (tb_status, POINTER(tb_ir), _OUT),
    "tb_ir_parse_json": (tb_status, c_char_p, c_size_t, _IR),
    "tb_batch_ir": (tb_status, c_void_p, c_bool, _IR),
    "tb_ir_execute": (tb_status, c_void_p, POINTER(tb_ir), POINTER(tb_ir_part), POINTER(tb_ir_execute_opts)),
}


def find(name: str) -> Path:
    """The file ``name`` of the package; in a checkout, that of the build in ``build/release`` or ``build/dev``."""
    here = Path(__file__).resolve().parent
    folders = [here / "bin"] + [here.parent.parent / "build" / preset for preset in ("release", "dev")]
    if library := os.environ.get("TENSORBUS_LIBRARY"):
        folders.insert(0, Path(library).parent)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise ImportError(
        f"{name} is in none of {', '.join(map(str, folders))}; install the tensorbus package, or, in a checkout, run "
        "./dev build; TENSORBUS_LIBRARY names the library of another build"
    )


def _find_package(name: str, file: str, variable: str) -> None:
    """Lets the library, and programs that it starts, find a library of a package, where the system has none."""
    try:
        package = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package that it is in
        return
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "lib" / file
        if path.exists():
            os.environ.setdefault(variable, f"{file}:{path}")


def _load() -> ctypes.CDLL:
    _find_package("libucx", "libucp.so.0", "TENSORBUS_UCX")
    _find_package("nvidia.nccl", "libnccl.so.2", "TENSORBUS_NCCL")
    _find_package("nvidia.nvshmem", "libnvshmem_host.so.3", "TENSORBUS_NVSHMEM")
    return ctypes.CDLL(os.environ.get("TENSORBUS_LIBRARY") or str(find("libtensorbus.so")))


def _check(status: int, _function: object, _arguments: object) -> int:
    if status != 0:
        raise _errors.make(status, lib.tb_error_detail().decode("utf-8", "replace"))
    return status


def declare(library: ctypes.CDLL, name: str) -> Callable[..., Any]:
    """The function, not checked: its status is its result."""
    result, *parameters = FUNCTIONS[name]
    function = library[name]
    function.restype = c_int if result is tb_status else result
    function.argtypes = parameters
    return function


def _declare_all(library: ctypes.CDLL) -> None:
    for name, (result, *_) in FUNCTIONS.items():
        function: Any = declare(library, name)
        if result is tb_status:
            function.errcheck = _check
        setattr(library, name, function)


lib: Any = _load()
_declare_all(lib)

_libc: Any = ctypes.CDLL(None)
_libc.free.argtypes = [c_void_p]
_libc.free.restype = None


def take_text(function: Callable[..., Any], *arguments: Any) -> str:
    """Calls a function whose last parameter is a text that the caller frees, and returns that."""
    out = c_void_p()
    function(*arguments, ctypes.byref(out))
    try:
        return ctypes.string_at(out.value or 0).decode("utf-8", "replace")
    finally:
        _libc.free(out)
