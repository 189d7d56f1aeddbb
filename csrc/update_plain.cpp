#define ECHELON_ISA_NAMESPACE isa_plain
#define ECHELON_ISA_NAME "plain"
#include "update.inc"
