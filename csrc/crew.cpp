#include "crew.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

#include "engine.h"

namespace echelon {

namespace {

// How long a helper looks for the next job before it sleeps: a server's ranges come one after the other, microseconds apart.
constexpr int64_t SPIN_NS = 50'000;
constexpr int64_t REST_NS = 3600'000'000'000;
constexpr int MOST_HELPERS = 255;

std::atomic<Crew*> crew{nullptr};

template <class F> bool spin_until(F seen) {
    for (int64_t until = 0; !seen();) {
        for (int i = 0; i < 32; i++) cpu_pause();
        int64_t now = now_ns();
        if (until == 0) until = now + SPIN_NS;
        else if (now >= until) return seen();
    }
    return true;
}

}  // namespace

Crew& Crew::of_process() {
    Crew* found = crew.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { crew.store(nullptr); });  // the parent's is left as it was
    auto* made = new Crew;
    if (crew.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

void Crew::Job::take_blocks() {
    while (true) {
        size_t at = next.fetch_add(block, std::memory_order_relaxed);
        if (at >= count) return;
        call(work, at, count - at < block ? count : at + block);
    }
}

void Crew::offer(Job& job) {
    {
        std::lock_guard hold(lock_);
        grow(job.seats);
        job.behind = first_;
        if (first_ != nullptr) first_->before = &job;
        first_ = &job;
    }
    offers_.fetch_add(1);
    if (asleep_.load() > 0) futex_wake(offers_, false);
    job.take_blocks();
    {
        std::lock_guard hold(lock_);  // nobody enters from here on
        (job.before != nullptr ? job.before->behind : first_) = job.behind;
        if (job.behind != nullptr) job.behind->before = job.before;
    }
    auto empty = [&] { return job.inside.load(std::memory_order_acquire) == 0; };
    while (!spin_until(empty))
        if (uint32_t inside = job.inside.load(); inside > 0) futex_wait(job.inside, inside, REST_NS, false);
}

// Holds the lock. A thread that cannot be made is done without.
void Crew::grow(int helpers) {
    for (; helpers_ < helpers && helpers_ < MOST_HELPERS; helpers_++) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for threads that know what to do
        try {
            std::thread thread([this] { help(); });
            pthread_setname_np(thread.native_handle(), "echelon-crew");
            thread.detach();
        } catch (const std::system_error&) {
            helpers = 0;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (helpers == 0) return;
    }
}

Crew::Job* Crew::enter() {
    std::lock_guard hold(lock_);
    for (Job* job = first_; job != nullptr; job = job->behind)
        if (job->seats > 0 && job->next.load(std::memory_order_relaxed) < job->count) {
            job->seats--;
            job->inside.fetch_add(1, std::memory_order_relaxed);
            return job;
        }
    return nullptr;
}

void Crew::help() {
    while (true) {
        uint32_t seen = offers_.load();
        if (Job* job = enter()) {
            job->take_blocks();
            // the job is its owner's stack, and gone as soon as nobody is inside: only its address is used after that
            if (std::atomic<uint32_t>& inside = job->inside; inside.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake(inside, false);
            continue;
        }
        if (spin_until([&] { return offers_.load(std::memory_order_acquire) != seen; })) continue;
        asleep_.fetch_add(1);
        if (offers_.load() == seen) futex_wait(offers_, seen, REST_NS, false);
        asleep_.fetch_sub(1);
    }
}

}  // namespace echelon
