// Threads that help with long ranges. Whoever has such work offers it in blocks, and takes blocks itself until none is left; helpers
// that are free take blocks as well. How many there are, and who takes which block, changes no result: a block is always the same.
#pragma once

#include <atomic>
#include <mutex>
#include <type_traits>

#include "types.h"

namespace echelon {

class Crew {
  public:
    // That of this process: made when it is first needed, and anew in a forked child, where the parent's threads are not. Never ends:
    // helpers sleep while there is nothing to do, and go with the process.
    static Crew& of_process();

    // work(begin, end) for every block of [0, count), on this thread and on up to threads - 1 helpers; returns when all of it is
    // done. A few blocks are not worth waking anybody. Any number of threads may call it at a time. `work` throws nothing.
    template <class F> void share(size_t count, size_t block, int threads, F&& work) {
        if (threads < 2 || count <= FEW * block) {
            for (size_t at = 0; at < count; at += block) work(at, count - at < block ? count : at + block);
            return;
        }
        Job job;
        job.call = [](void* f, size_t begin, size_t end) { (*static_cast<std::remove_reference_t<F>*>(f))(begin, end); };
        job.work = &work;
        job.count = count;
        job.block = block;
        size_t blocks = (count + block - 1) / block;
        job.seats = int(blocks < size_t(threads) ? blocks : size_t(threads)) - 1;
        offer(job);
    }

  private:
    static constexpr size_t FEW = 4;

    struct Job {
        void (*call)(void*, size_t, size_t);
        void* work;
        size_t count, block;
        int seats;  // for helpers; under lock_, as is the list
        Job *before = nullptr, *behind = nullptr;
        std::atomic<size_t> next{0};
        std::atomic<uint32_t> inside{0};  // helpers; a futex

        void take_blocks();
    };

    void offer(Job& job);
    void grow(int helpers);
    void help();
    Job* enter();

    std::mutex lock_;
    Job* first_ = nullptr;
    int helpers_ = 0;
    std::atomic<uint32_t> offers_{0};  // a futex: changes with every job
    std::atomic<int> asleep_{0};
};

}  // namespace echelon
