#include "kernels.h"

#include <atomic>

namespace echelon {

namespace isa_plain { extern const Kernels table; }
#if defined(ECHELON_X86)
namespace isa_avx2 { extern const Kernels table; }
namespace isa_avx512 { extern const Kernels table; }
#endif

namespace {

const Kernels* find(const std::string& name) {
#if defined(ECHELON_X86)
    __builtin_cpu_init();
    if (name == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2"))
        return &isa_avx512::table;
    if (name == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &isa_avx2::table;
#endif
    return name == "plain" ? &isa_plain::table : nullptr;
}

const Kernels* best() {
    for (const char* name : {"avx512", "avx2"})
        if (const Kernels* found = find(name)) return found;
    return &isa_plain::table;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* now = chosen.load(std::memory_order_acquire);
    if (now == nullptr) chosen.store(now = best(), std::memory_order_release);
    return *now;
}

bool choose(const std::string& name) {
    const Kernels* found = name.empty() ? best() : find(name);
    if (found != nullptr) chosen.store(found, std::memory_order_release);
    return found != nullptr;
}

std::vector<std::string> available() {
    std::vector<std::string> names;
    for (const char* name : {"plain", "avx2", "avx512"})
        if (find(name) != nullptr) names.push_back(name);
    return names;
}

bool combines(DType dtype, RedOp op) {
    bool real = dtype <= DType::bf16;
    if (op == RedOp::band || op == RedOp::bor || op == RedOp::bxor) return !real;
    return !(op == RedOp::avg && dtype == DType::b8);
}

}  // namespace echelon
