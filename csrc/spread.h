// Long ranges, cut into blocks that the crew shares: what update.h does to a range, with the sum of the gradient's parts before it and
// copies of the new values behind it, block by block while that is in the cache. The same bits for any number of threads.
#pragma once

#include "update.h"

namespace echelon {

struct Spread {
    std::vector<const void*> parts;  // of the gradient: their sum in this order; range.grad is not looked at
    std::vector<void*> copies;       // where the new values go as well; they overlap nothing else
    int threads = 1;
    bool large = false;  // the copies are more than the cache holds: they go past it
};

void step(const Range&, const Sgd&, const Spread&);
void step(const Range&, const Adagrad&, const Spread&);
void step(const Range&, const RmsProp&, const Spread&);
void step(const Range&, const Adam&, const Spread&);

// Every dst becomes the sum of all srcs in this order. A dst may be one of the srcs.
void sum(const std::vector<void*>& dsts, const std::vector<const void*>& srcs, size_t count, DType, int threads);
double sum_of_squares(const void* x, size_t count, DType, int threads);
bool finite(const void* x, size_t count, DType, int threads);
// Whether as[i] and bs[i] are the same bytes, for all i.
bool same(const std::vector<const void*>& as, const std::vector<const void*>& bs, const std::vector<uint64_t>& bytes, int threads);
void copy(void* dst, const void* src, size_t bytes, int threads);

}  // namespace echelon
