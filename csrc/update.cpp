#include "update.h"

#include <cstring>

#include "kernels.h"

namespace echelon {

namespace isa_plain { extern const Updates updates; }
#if defined(ECHELON_X86)
namespace isa_avx2 { extern const Updates updates; }
namespace isa_avx512 { extern const Updates updates; }
#endif

const Updates& updates() {
#if defined(ECHELON_X86)
    static const bool fuses = __builtin_cpu_supports("fma");  // every processor with avx2 that we know of
    const char* name = kernels().name;
    if (fuses && std::strcmp(name, "avx512") == 0) return isa_avx512::updates;
    if (fuses && std::strcmp(name, "avx2") == 0) return isa_avx2::updates;
#endif
    return isa_plain::updates;
}

}  // namespace echelon
