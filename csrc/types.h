// The words of the core: what an element is, how elements are combined, how a call ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace echelon {

enum class DType : uint8_t { f32, f64, f16, bf16, i8, u8, i16, u16, i32, u32, i64, u64, b8, count };
enum class RedOp : uint8_t { sum, avg, min, max, prod, band, bor, bxor, count };
enum class Kind : uint8_t {
    barrier, all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, count
};

size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(RedOp op);
const char* name_of(Kind kind);

// Who was lost, as far as known, and why we think so. A value, never thrown across an operation.
struct Failure {
    std::vector<int> peers;
    std::string reason;
    const char* cause = "aborted";  // dead, silent, left, gave up, late, mismatch, closed, broken, aborted
};

// Wrong use or a system call that failed while something was being set up; becomes a Python exception.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

int64_t now_ns();  // monotonic

}  // namespace echelon
