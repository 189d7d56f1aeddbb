// What Python calls of update.h and spread.h: a part of bind.cpp, included there alone.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "spread.h"

namespace {

namespace nb = nanobind;
using namespace nb::literals;
using namespace echelon;

// An array before and after a step.
using Two = std::tuple<uintptr_t, uintptr_t>;
Array array(const Two& x, bool needed = true) {
    if (needed && (std::get<0>(x) == 0 || std::get<1>(x) == 0)) throw nb::value_error("an array that this step needs is missing");
    return {reinterpret_cast<const void*>(std::get<0>(x)), reinterpret_cast<void*>(std::get<1>(x))};
}

DType real(int dtype) {
    if (DType(dtype) != DType::f32 && DType(dtype) != DType::f64) throw nb::value_error("optimizers need float32 or float64");
    return DType(dtype);
}

using Places = std::vector<uintptr_t>;
template <class T> std::vector<T*> pointers(const Places& places) {
    std::vector<T*> found;
    for (uintptr_t place : places) found.push_back(reinterpret_cast<T*>(place));
    return found;
}

// How the first arguments of every optimizer become a range, and the last ones the way it is gone through; the rest are its own.
Range range(const Two& param, uint64_t count, int dtype, double scale, double weight_decay) {
    return {array(param, count > 0), nullptr, count, real(dtype), scale, weight_decay};
}
Spread spread(const Places& parts, const Places& copies, int threads, bool large) {
    if (parts.empty()) throw nb::value_error("a step needs a gradient");
    return {pointers<const void>(parts), pointers<void>(copies), threads, large};
}
template <class Own> void stepped(const Range& range, const Own& own, const Spread& how) {
    nb::gil_scoped_release release;
    step(range, own, how);
}

void sgd(const Two& param, const Places& parts, uint64_t count, int dtype, double scale, double weight_decay, const Two& momentum_buffer,
         double lr, double momentum, double dampening, bool nesterov, bool first, const Places& copies, int threads, bool large) {
    Range r = range(param, count, dtype, scale, weight_decay);
    Sgd own{array(momentum_buffer, count > 0 && momentum != 0), lr, momentum, dampening, nesterov, first};
    stepped(r, own, spread(parts, copies, threads, large));
}

void adagrad(const Two& param, const Places& parts, uint64_t count, int dtype, double scale, double weight_decay, const Two& sum, double lr,
             double eps, const Places& copies, int threads, bool large) {
    Range r = range(param, count, dtype, scale, weight_decay);
    Adagrad own{array(sum, count > 0), lr, eps};
    stepped(r, own, spread(parts, copies, threads, large));
}

void rmsprop(const Two& param, const Places& parts, uint64_t count, int dtype, double scale, double weight_decay, const Two& square_avg,
             const Two& momentum_buffer, const Two& grad_avg, double lr, double alpha, double eps, double momentum, bool centered,
             const Places& copies, int threads, bool large) {
    Range r = range(param, count, dtype, scale, weight_decay);
    RmsProp own{array(square_avg, count > 0), array(momentum_buffer, count > 0 && momentum > 0), array(grad_avg, count > 0 && centered),
                lr, alpha, eps, momentum, centered};
    stepped(r, own, spread(parts, copies, threads, large));
}

void adam(const Two& param, const Places& parts, uint64_t count, int dtype, double scale, double weight_decay, const Two& exp_avg,
          const Two& exp_avg_sq, const Two& max_exp_avg_sq, double step_size, double beta1, double beta2, double eps, double correction,
          double shrink, bool amsgrad, const Places& copies, int threads, bool large) {
    Range r = range(param, count, dtype, scale, weight_decay);
    Adam own{array(exp_avg, count > 0), array(exp_avg_sq, count > 0), array(max_exp_avg_sq, count > 0 && amsgrad),
             step_size, beta1, beta2, eps, correction, shrink, amsgrad};
    stepped(r, own, spread(parts, copies, threads, large));
}

void average(const Two& average, uintptr_t x, uint64_t count, int dtype, double weight) {
    DType type = real(dtype);
    Array both = array(average, count > 0);
    nb::gil_scoped_release release;
    updates().average(both, reinterpret_cast<const void*>(x), count, type, weight);
}

double squares(uintptr_t x, uint64_t count, int dtype, int threads) {
    DType type = real(dtype);
    nb::gil_scoped_release release;
    return sum_of_squares(reinterpret_cast<const void*>(x), count, type, threads);
}

bool all_finite(uintptr_t x, uint64_t count, int dtype, int threads) {
    DType type = real(dtype);
    nb::gil_scoped_release release;
    return finite(reinterpret_cast<const void*>(x), count, type, threads);
}

void add_up(const Places& dsts, const Places& srcs, uint64_t count, int dtype, int threads) {
    if (DType(dtype) >= DType::count || srcs.empty()) throw nb::value_error("these elements cannot be added up");
    auto to = pointers<void>(dsts);
    auto from = pointers<const void>(srcs);
    nb::gil_scoped_release release;
    sum(to, from, count, DType(dtype), threads);
}

bool same_bytes(const Places& as, const Places& bs, const std::vector<uint64_t>& bytes, int threads) {
    if (as.size() != bs.size() || as.size() != bytes.size()) throw nb::value_error("each needs another to be compared with, and a size");
    auto a = pointers<const void>(as), b = pointers<const void>(bs);
    nb::gil_scoped_release release;
    return same(a, b, bytes, threads);
}

void copy_bytes(uintptr_t dst, uintptr_t src, uint64_t bytes, int threads) {
    nb::gil_scoped_release release;
    copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes, threads);
}

void bind_updates(nb::module_& m) {
    m.def("sgd", &sgd, "param"_a, "parts"_a, "count"_a, "dtype"_a, "scale"_a, "weight_decay"_a,
          "momentum_buffer"_a, "lr"_a, "momentum"_a, "dampening"_a, "nesterov"_a, "first"_a,
          "copies"_a = Places(), "threads"_a = 1, "large"_a = false);
    m.def("adagrad", &adagrad, "param"_a, "parts"_a, "count"_a, "dtype"_a, "scale"_a, "weight_decay"_a,
          "sum"_a, "lr"_a, "eps"_a, "copies"_a = Places(), "threads"_a = 1, "large"_a = false);
    m.def("rmsprop", &rmsprop, "param"_a, "parts"_a, "count"_a, "dtype"_a, "scale"_a, "weight_decay"_a,
          "square_avg"_a, "momentum_buffer"_a, "grad_avg"_a, "lr"_a, "alpha"_a, "eps"_a, "momentum"_a, "centered"_a,
          "copies"_a = Places(), "threads"_a = 1, "large"_a = false);
    m.def("adam", &adam, "param"_a, "parts"_a, "count"_a, "dtype"_a, "scale"_a, "weight_decay"_a,
          "exp_avg"_a, "exp_avg_sq"_a, "max_exp_avg_sq"_a, "step_size"_a, "beta1"_a, "beta2"_a, "eps"_a, "correction"_a,
          "shrink"_a, "amsgrad"_a, "copies"_a = Places(), "threads"_a = 1, "large"_a = false);
    m.def("average", &average);
    m.def("sum_of_squares", &squares, "x"_a, "count"_a, "dtype"_a, "threads"_a = 1);
    m.def("finite", &all_finite, "x"_a, "count"_a, "dtype"_a, "threads"_a = 1);
    m.def("sum", &add_up, "dsts"_a, "srcs"_a, "count"_a, "dtype"_a, "threads"_a = 1);
    m.def("same", &same_bytes, "as"_a, "bs"_a, "bytes"_a, "threads"_a = 1);
    m.def("copy", &copy_bytes, "dst"_a, "src"_a, "bytes"_a, "threads"_a = 1);
}

}  // namespace
