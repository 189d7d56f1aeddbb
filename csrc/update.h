// What a parameter server does to a flat range of numbers: one step of an optimizer in one pass over memory, and what
// clipping, averaging and looking for NaN need. float32 and float64. Twins: echelon/native/reference_update.py.
//
// The order of operations is that of torch.optim's single-tensor code. Where torch's vector code multiplies and adds in one
// rounding, so does this (fma by name; the compiler fuses nothing on its own), so SGD gives torch's own bits. Square roots are
// correctly rounded. The same bits come out of every instruction set, and however a tensor is cut into ranges.
#pragma once

#include "types.h"

namespace echelon {

// An array before and after the step: the same memory, or two that do not overlap.
struct Array {
    const void* from = nullptr;
    void* to = nullptr;
};

struct Range {
    Array param;
    const void* grad;  // overlaps nothing else
    size_t count;
    DType dtype;
    double scale;  // the gradient is taken times this: means, clip factors; negative to maximize
    double weight_decay;  // added to the gradient, unless 0
};

struct Sgd {
    Array momentum_buffer;  // unless momentum is 0
    double lr, momentum, dampening;
    bool nesterov, first;  // first: the buffer becomes the gradient, whatever it held
};

struct Adagrad {
    Array sum;
    double lr, eps;  // lr: of this step, after its decay
};

struct RmsProp {
    Array square_avg, momentum_buffer, grad_avg;  // the last two if momentum > 0 and if centered
    double lr, alpha, eps, momentum;
    bool centered;
};

struct Adam {
    Array exp_avg, exp_avg_sq, max_exp_avg_sq;  // the last one if amsgrad
    double step_size, beta1, beta2, eps;  // step_size = lr / (1 - beta1^step)
    double correction;                    // sqrt(1 - beta2^step)
    double shrink;                        // the parameter is first taken times this: AdamW's decay, else 1
    bool amsgrad;
};

struct Updates {
    const char* name;  // as in Kernels
    void (*sgd)(const Range&, const Sgd&);
    void (*adagrad)(const Range&, const Adagrad&);
    void (*rmsprop)(const Range&, const RmsProp&);
    void (*adam)(const Range&, const Adam&);
    // average + weight * (x - average), as torch.lerp
    void (*average)(Array average, const void* x, size_t count, DType, double weight);
    // In double. Blocks of 4096: 16 lanes a block, each summed in order, added in pairs; then the blocks in order.
    double (*sum_of_squares)(const void* x, size_t count, DType);
    bool (*finite)(const void* x, size_t count, DType);  // neither NaN nor infinity in it
};

// Those of the instruction set that kernels() uses.
const Updates& updates();

}  // namespace echelon
