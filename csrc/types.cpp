#include "types.h"

#include <time.h>

namespace echelon {

size_t size_of(DType dtype) {
    static constexpr size_t sizes[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1};
    return sizes[static_cast<size_t>(dtype)];
}

const char* name_of(DType dtype) {
    static constexpr const char* names[] = {"float32", "float64", "float16", "bfloat16", "int8",   "uint8", "int16",
                                            "uint16",  "int32",   "uint32",  "int64",    "uint64", "bool"};
    return dtype < DType::count ? names[static_cast<size_t>(dtype)] : "?";
}

const char* name_of(RedOp op) {
    static constexpr const char* names[] = {"sum", "avg", "min", "max", "prod", "and", "or", "xor"};
    return op < RedOp::count ? names[static_cast<size_t>(op)] : "?";
}

const char* name_of(Kind kind) {
    static constexpr const char* names[] = {"barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                            "reduce",  "gather",     "scatter",        "all_to_all"};
    return kind < Kind::count ? names[static_cast<size_t>(kind)] : "?";
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace echelon
