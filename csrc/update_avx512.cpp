#define ECHELON_ISA_NAMESPACE isa_avx512
#define ECHELON_ISA_NAME "avx512"
#include "update.inc"
