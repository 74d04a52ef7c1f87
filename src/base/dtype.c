/* Dtypes: one table for names, sizes and kinds. */
#include "base/dtype.h"

#include "base/error.h"

#include <string.h>
#include <strings.h>

static const struct {
    const char *name, *torch, *safetensors;
    unsigned bits;
    tb__dtype_class cls;
} table[TB_DTYPE_COUNT] = {
    [TB_BOOL] = {"bool", "bool", "BOOL", 8, TB__OPAQUE},
    [TB_U8] = {"u8", "uint8", "U8", 8, TB__INTEGER},
    [TB_U16] = {"u16", "uint16", "U16", 16, TB__INTEGER},
    [TB_U32] = {"u32", "uint32", "U32", 32, TB__INTEGER},
    [TB_U64] = {"u64", "uint64", "U64", 64, TB__INTEGER},
    [TB_I8] = {"i8", "int8", "I8", 8, TB__INTEGER},
    [TB_I16] = {"i16", "int16", "I16", 16, TB__INTEGER},
    [TB_I32] = {"i32", "int32", "I32", 32, TB__INTEGER},
    [TB_I64] = {"i64", "int64", "I64", 64, TB__INTEGER},
    [TB_F16] = {"f16", "float16", "F16", 16, TB__FLOAT},
    [TB_BF16] = {"bf16", "bfloat16", "BF16", 16, TB__FLOAT},
    [TB_F32] = {"f32", "float32", "F32", 32, TB__FLOAT},
    [TB_F64] = {"f64", "float64", "F64", 64, TB__FLOAT},
    [TB_F8E4M3] = {"f8e4m3", "float8_e4m3fn", "F8_E4M3", 8, TB__FLOAT},
    [TB_F8E5M2] = {"f8e5m2", "float8_e5m2", "F8_E5M2", 8, TB__FLOAT},
    [TB_E8M0] = {"e8m0", "float8_e8m0fnu", "F8_E8M0", 8, TB__OPAQUE},
    [TB_F4E2M1] = {"f4e2m1", "f4e2m1", "F4", 4, TB__OPAQUE},
};

static bool is_known(tb_dtype dtype) {
    return (unsigned)dtype < TB_DTYPE_COUNT && table[dtype].name;
}

const char *tb_dtype_name(tb_dtype dtype) {
    return is_known(dtype) ? table[dtype].name : NULL;
}

const char *tb__dtype_safetensors(tb_dtype dtype) {
    return is_known(dtype) ? table[dtype].safetensors : NULL;
}

unsigned tb_dtype_bits(tb_dtype dtype) {
    return is_known(dtype) ? table[dtype].bits : 0;
}

tb__dtype_class tb__dtype_class_of(tb_dtype dtype) {
    return is_known(dtype) ? table[dtype].cls : TB__OPAQUE;
}

static bool is_signed(tb_dtype dtype) {
    return table[dtype].name[0] == 'i';
}

bool tb__dtype_has_values_of(tb_dtype dtype, tb_dtype of) {
    if (is_signed(dtype) == is_signed(of))
        return table[dtype].bits >= table[of].bits;
    return is_signed(dtype) && table[dtype].bits > table[of].bits;
}

tb_status tb_dtype_parse(const char *name, tb_dtype *out) {
    const char *given = name;
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (tb_dtype d = TB_DTYPE_NONE + 1; d < TB_DTYPE_COUNT; d++) {
        if (strcasecmp(name, table[d].name) == 0 || strcasecmp(name, table[d].torch) == 0 ||
            strcasecmp(name, table[d].safetensors) == 0) {
            *out = d;
            return TB_OK;
        }
    }
    return tb__fail(TB_INVALID,
                    "'%.40s' is not a dtype; there are bool, u8..u64, i8..i64, f16, bf16, f32, f64, "
                    "f8e4m3, f8e5m2, e8m0, f4e2m1",
                    given);
}
