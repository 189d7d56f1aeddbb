#include "cost.h"

namespace echelon {

namespace {

int rounds(int size) {
    int num = 0;
    for (int reach = 1; reach < size; reach *= 2) num++;
    return num;
}

constexpr uint64_t MOST_SCRATCH = 4 << 20;  // what every rank's part may take here, before it is added up

}  // namespace

const char* name_of(Way way) {
    const char* names[] = {"flat", "bruck", "slices", "tree"};
    return names[int(way)];
}

// `bytes`: of one rank's part; of the whole for those that are cut into slices.
double cost(Way way, Kind kind, uint64_t bytes, int size, const Costs& costs) {
    const double others = size - 1, whole = double(bytes) * costs.beta, once = costs.alpha + others * costs.each;
    switch (kind) {
        case Kind::barrier:
        case Kind::all_gather:
            if (way == Way::bruck && bytes * uint64_t(size) > MOST_SCRATCH) return -1;
            if (way == Way::flat) return once + others * whole;
            if (way == Way::bruck) return rounds(size) * (costs.alpha + costs.each) + others * whole;
            return -1;
        case Kind::all_reduce:
            if (way != Way::slices && bytes * uint64_t(size) > MOST_SCRATCH) return -1;
            if (way == Way::flat) return once + others * whole;
            if (way == Way::bruck) return rounds(size) * (costs.alpha + costs.each) + others * whole;
            if (way == Way::slices) return 2 * once + 2 * others / size * whole;
            return -1;
        case Kind::reduce:
            if (way != Way::slices && bytes * uint64_t(size) > MOST_SCRATCH) return -1;
            if (way == Way::flat) return once + others * whole;
            if (way == Way::slices) return 2 * once + 2 * others / size * whole;
            return -1;
        case Kind::broadcast:
            if (way == Way::flat) return once + others * whole;
            if (way == Way::tree) return rounds(size) * (costs.alpha + costs.each + whole);
            if (way == Way::slices) return size < 3 ? -1 : 2 * once + whole * (1 + 1 / others);
            return -1;
        default: return way == Way::flat ? once + others * whole : -1;
    }
}

Way cheapest(Kind kind, uint64_t bytes, int size, const Costs& costs) {
    Way best = Way::flat;
    double least = -1;
    for (Way way : {Way::flat, Way::bruck, Way::slices, Way::tree}) {
        double seconds = cost(way, kind, bytes, size, costs);
        if (seconds < 0 || (least >= 0 && seconds >= least)) continue;
        best = way;
        least = seconds;
    }
    return best;
}

}  // namespace echelon
