// Element-wise work over plain memory. Each has a twin in echelon/native/reference.py.
//
// Combining is a left fold in the order of `srcs`, so the order of ranks is the order of rounding. float16 and bfloat16
// are combined in float32 and rounded once. The same bits come out of every instruction set.
#pragma once

#include "types.h"

namespace echelon {

// dst[i] = srcs[0][i] op srcs[1][i] op …, `num` of them. dst may be one of the sources. avg divides by `num`.
using FoldFn = void (*)(void* dst, const void* const* srcs, int num, size_t count, DType, RedOp);
// The same with several destinations, each of which may be one of the sources.
using FoldToFn = void (*)(void* const* dsts, int num_dsts, const void* const* srcs, int num, size_t count, DType, RedOp);

struct Kernels {
    const char* name;  // "plain", "avx2", "avx512"
    FoldFn fold;
    FoldToFn fold_to;
};

// The best set that this processor has; ECHELON_ISA-like choices are the caller's: see choose().
const Kernels& kernels();
// Picks a set by name; false when the processor lacks it.
bool choose(const std::string& name);
std::vector<std::string> available();

// Whether the pair makes sense: and/or/xor need integers or bool, avg needs numbers.
bool combines(DType dtype, RedOp op);

}  // namespace echelon
