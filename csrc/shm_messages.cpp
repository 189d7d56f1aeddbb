// Messages between two ranks of a host: one ring of bytes for each ordered pair, frames of a header and a payload.
//
// A payload longer than the ring flows through it. A receiver that finds a message nobody has asked for yet keeps it aside, so
// that tags may be taken in any order.
#include <string.h>

#include <algorithm>

#include "shm.h"

namespace echelon {

namespace {

struct Frame {
    uint64_t bytes;
    int32_t tag;
    uint32_t check;
};
constexpr uint32_t CHECK = 0x6d736731;
constexpr uint64_t PIECES = 4;  // of a ring: one side writes the next while the other takes the last

// Copies out of a ring, from byte `at` of the endless stream on.
void out_of_ring(const char* ring, uint64_t ring_bytes, uint64_t at, char* to, uint64_t bytes) {
    uint64_t begin = at % ring_bytes, first = std::min(bytes, ring_bytes - begin);
    memcpy(to, ring + begin, first);
    memcpy(to + first, ring, bytes - first);
}

std::string unfit(int from, uint64_t bytes, const Message& wanted) {
    return "rank " + std::to_string(from) + " sent " + std::to_string(bytes) + " bytes (tag " + std::to_string(wanted.tag) +
           ") to a recv of " + std::to_string(wanted.bytes) + " bytes";
}

}  // namespace

Message::Message(bool sends, void* x, uint64_t bytes, int peer, int32_t tag)
    : sends(sends), x(static_cast<char*>(x)), bytes(bytes), peer(peer), tag(tag) {
    lane = NO_LANE;
    small = bytes <= SMALL_BYTES;
}

void Message::lie_ready(uint64_t most) {
    small = anytime = bytes <= most;
    quiet = small && !sends;
}

std::string Message::what() const {
    std::string whom = peer < 0 ? "anybody" : "rank " + std::to_string(peer);
    return (sends ? "send of " : "recv of ") + std::to_string(bytes) + " bytes " + (sends ? "to " : "from ") + whom +
           " (tag " + std::to_string(tag) + ")";
}

int Shm::number(int name) const {
    if (names.empty()) return name;
    auto found = std::find(names.begin(), names.end(), name);
    return found == names.end() ? -1 : int(found - names.begin());
}

void Shm::accept(std::shared_ptr<Op> op) {
    auto message = std::static_pointer_cast<Message>(std::move(op));
    (message->sends ? sends_ : recvs_).push_back(std::move(message));
}

std::vector<std::shared_ptr<Op>> Shm::drop() {
    std::vector<std::shared_ptr<Op>> all(sends_.begin(), sends_.end());
    all.insert(all.end(), recvs_.begin(), recvs_.end());
    for (auto& from : incoming_)
        if (from.into) all.push_back(std::move(from.into));
    sends_.clear();
    recvs_.clear();
    num_open_ = 0;
    return all;
}

std::vector<int> Shm::served_behind() const {
    std::vector<int> ranks;
    bool anybody = false;
    for (auto& message : sends_) ranks.push_back(message->peer);
    for (auto& message : recvs_) message->peer < 0 ? void(anybody = true) : ranks.push_back(message->peer);
    for (int peer = 0; peer < size; peer++)
        if (incoming_[peer].into) ranks.push_back(name(peer));
    if (anybody && ranks.empty() && size > 1 && names.empty()) {  // lost only when everybody else is, on all hosts
        Failure unused;
        bool all_gone = true;
        for (int peer = 0; peer < size && all_gone; peer++)
            all_gone = peer == rank || const_cast<Shm*>(this)->trouble({peer}, unused);
        for (int peer = 0; peer < size && all_gone; peer++)
            if (peer != rank) ranks.push_back(peer);
    }
    return ranks;
}

bool Shm::serve(std::vector<std::shared_ptr<Op>>& finished) {
    bool moved = false;
    forget_claimed();
    std::vector<bool> busy(size, false);  // one message a receiver at a time, in order
    for (auto it = sends_.begin(); it != sends_.end();) {
        Message& message = **it;
        const int to = number(message.peer);
        if (busy[to]) {
            ++it;
            continue;
        }
        moved |= push(message, to);
        if (message.done == sizeof(Frame) + message.bytes) {
            finished.push_back(*it);
            it = sends_.erase(it);
        } else {
            busy[to] = true;
            ++it;
        }
    }
    match_kept(finished, moved);
    for (int from = 0; from < size; from++) {
        auto wanted = [&] {
            return incoming_[from].into || std::any_of(recvs_.begin(), recvs_.end(), [&](auto& m) { return takes(*m, from); });
        };
        while (wanted() && pull(from, finished)) moved = true;
    }
    return moved;
}

void Shm::into_ring(int to, uint64_t at, const char* from, uint64_t bytes) {
    char* memory = ring_memory(rank, to);
    uint64_t begin = at % layout.ring_bytes, first = std::min(bytes, layout.ring_bytes - begin);
    put(memory + begin, from, first);
    put(memory, from + first, bytes - first);
}

// Writes as much of a message as the ring takes.
bool Shm::push(Message& message, int to) {
    Ring& mine = ring(rank, to);
    uint64_t sent = mine.sent.load(std::memory_order_relaxed);
    uint64_t taken = ring(to, rank).taken.load(std::memory_order_acquire);
    uint64_t room = layout.ring_bytes - (sent - taken), before = message.done;
    if (message.done == 0) {
        if (room < sizeof(Frame)) return false;
        Frame frame{message.bytes, message.tag, CHECK};
        into_ring(to, sent, reinterpret_cast<char*>(&frame), sizeof frame);
        message.done = sizeof frame;
        sent += sizeof frame;
        room -= sizeof frame;
    }
    uint64_t piece = std::min({room, sizeof(Frame) + message.bytes - message.done, layout.ring_bytes / PIECES});
    into_ring(to, sent, message.x + (message.done - sizeof(Frame)), piece);
    message.done += piece;
    if (message.done == before) return false;
    mine.sent.store(sent + piece, std::memory_order_seq_cst);
    if (to != rank) knock(to);
    return true;
}

// Takes what one sender's ring has: a header, or a piece of the payload.
bool Shm::pull(int from, std::vector<std::shared_ptr<Op>>& finished) {
    Incoming& now = incoming_[from];
    Ring& mine = ring(rank, from);
    char* memory = ring_memory(from, rank);
    uint64_t taken = mine.taken.load(std::memory_order_relaxed);
    uint64_t there = ring(from, rank).sent.load(std::memory_order_acquire) - taken, before = taken;
    if (!now.open) {
        if (there < sizeof(Frame)) return false;
        Frame frame;
        out_of_ring(memory, layout.ring_bytes, taken, reinterpret_cast<char*>(&frame), sizeof frame);
        if (frame.check != CHECK) {
            engine->fail({{name(from)}, "rank " + std::to_string(name(from)) + " sent something that is not a message", "broken"});
            return false;
        }
        auto wanted = std::find_if(recvs_.begin(), recvs_.end(), [&](auto& m) { return takes(*m, from) && m->tag == frame.tag; });
        if (wanted != recvs_.end() && (*wanted)->bytes != frame.bytes) {  // not begun: there is no place for it
            engine->fail({{name(from)}, unfit(name(from), frame.bytes, **wanted), "mismatch"});
            return false;
        }
        taken += sizeof frame;
        there -= sizeof frame;
        now.open = true;
        now.tag = frame.tag;
        now.bytes = frame.bytes;
        now.done = 0;
        if (wanted == recvs_.end()) {
            now.stash.resize(frame.bytes);
        } else {
            now.into = *wanted;
            claim(*now.into, from);
            recvs_.erase(wanted);
            num_open_++;
        }
    }
    uint64_t piece = std::min({there, now.bytes - now.done, layout.ring_bytes / PIECES});
    char* to = now.into ? now.into->x : now.stash.data();
    out_of_ring(memory, layout.ring_bytes, taken, to + now.done, piece);
    now.done += piece;
    taken += piece;
    if (taken != before) {
        mine.taken.store(taken, std::memory_order_seq_cst);
        if (from != rank) knock(from);
    }
    if (now.done == now.bytes) {
        if (now.into) {
            finished.push_back(std::move(now.into));
            num_open_--;
        } else now.kept.push_back({now.tag, std::move(now.stash)});
        now.open = false;
        now.into.reset();
        now.stash = {};
        bool given = false;
        match_kept(finished, given);  // whoever asked meanwhile comes before the next message's taker
    }
    return taken != before;
}

// Gives messages that were kept aside to those who ask now.
void Shm::match_kept(std::vector<std::shared_ptr<Op>>& finished, bool& moved) {
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        bool given = false;
        for (int from = 0; from < size && !given; from++) {
            if (!takes(**it, from)) continue;
            auto& kept = incoming_[from].kept;
            auto found = std::find_if(kept.begin(), kept.end(), [&](auto& stash) { return stash.tag == (*it)->tag; });
            if (found == kept.end()) continue;
            if (found->bytes.size() != (*it)->bytes) {
                engine->fail({{name(from)}, unfit(name(from), found->bytes.size(), **it), "mismatch"});
                return;
            }
            memcpy((*it)->x, found->bytes.data(), found->bytes.size());
            kept.erase(found);
            claim(**it, from);
            given = moved = true;
        }
        if (!given) {
            ++it;
            continue;
        }
        finished.push_back(*it);
        it = recvs_.erase(it);
    }
}

}  // namespace echelon
