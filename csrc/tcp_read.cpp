// The reading half: from bytes to frames, and from a frame to the place of its payload. What cannot be ends the group.
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

#include "shm_ops.h"
#include "tcp.h"

namespace echelon {

bool Tcp::read(Link& link, Stream& stream) {
    bool moved = false;
    uint64_t taken = 0;
    while (true) {
        moved |= advance(link, stream);
        if (engine->failed() || (stream.open && !stream.placed)) return moved;
        if (!stream.readable || stream.ended || taken >= BUDGET_BYTES) return moved;
        ssize_t num = fill(stream);
        if (num > 0) {
            taken += uint64_t(num);
            moved = true;
        } else if (num == 0) {
            ended(link, stream, "closed by its end, which died or was stopped");
        } else if (errno == EAGAIN) {
            stream.readable = false;
        } else if (errno != EINTR) {
            bool silent = errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH;
            if (silent) link.cause = "silent";
            ended(link, stream, silent ? "nothing was heard for " + std::to_string(int(options_.limit_s)) + " s" : strerror(errno));
        }
    }
}

ssize_t Tcp::fill(Stream& stream) {
    if (stream.ahead_at == stream.ahead_end) stream.ahead_at = stream.ahead_end = 0;
    if (stream.ahead_at > 0) {  // part of a header
        memmove(stream.ahead.data(), stream.ahead.data() + stream.ahead_at, stream.ahead_end - stream.ahead_at);
        stream.ahead_end -= stream.ahead_at;
        stream.ahead_at = 0;
    }
    iovec parts[2];
    int num_parts = 0;
    uint64_t room = stream.open ? stream.head.bytes - stream.done : 0, more = AHEAD_BYTES - stream.ahead_end;
    if (room > 0) parts[num_parts++] = {stream.to + stream.done, size_t(room)};
    parts[num_parts++] = {stream.ahead.data() + stream.ahead_end, size_t(more)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = size_t(num_parts);
    ssize_t num = recvmsg(stream.fd, &message, MSG_DONTWAIT);
    if (num <= 0) return num;
    if (uint64_t(num) < room + more && !stream.hung_up) stream.readable = false;  // drained: what comes next is told anew
    uint64_t direct = std::min<uint64_t>(uint64_t(num), room);
    stream.done += direct;
    stream.ahead_end += uint64_t(num) - direct;
    return num;
}

bool Tcp::advance(Link& link, Stream& stream) {
    bool moved = false;
    while (!engine->failed()) {
        uint64_t there = stream.ahead_end - stream.ahead_at;
        if (!stream.open) {
            if (there < sizeof(Head)) return moved;
            memcpy(&stream.head, stream.ahead.data() + stream.ahead_at, sizeof(Head));
            stream.ahead_at += sizeof(Head);
            there -= sizeof(Head);
            stream.open = true;
            stream.placed = false;
            stream.done = 0;
            if (!sound(stream)) return true;
        }
        if (!stream.placed) {
            if (!begin_frame(link, stream)) return moved;
            stream.placed = true;
        }
        uint64_t piece = std::min(there, stream.head.bytes - stream.done);
        if (piece > 0) memcpy(stream.to + stream.done, stream.ahead.data() + stream.ahead_at, piece);
        stream.ahead_at += piece;
        stream.done += piece;
        if (stream.done < stream.head.bytes) return moved;
        stream.open = false;
        moved = true;
        end_frame(link, stream);
    }
    return moved;
}

bool Tcp::sound(const Stream& stream) {
    const Head& head = stream.head;
    What what = What(head.what);
    bool right = head.magic == MAGIC;
    if (stream.kind == CONTROL) right &= what >= What::ready && what < What::count && head.bytes <= (what == What::failure ? MAX_WORDS : 0);
    else if (stream.kind == MESSAGES) right &= what == What::message || what == What::offer || what == What::payload;
    else right &= what == What::data && head.lane == stream.kind - FIRST_LANE && head.kind < uint8_t(Kind::count) &&
                  head.dtype < uint8_t(DType::count) && head.op < uint8_t(RedOp::count);
    if (right && head.term == options_.term) return true;
    engine->fail({{stream.peer}, right ? name(stream.peer) + " sent a frame of term " + std::to_string(head.term) + "; this is term " +
                                             std::to_string(options_.term)
                                       : name(stream.peer) + " sent something that is not a frame",
                  "broken"});
    return false;
}

bool Tcp::begin_frame(Link& link, Stream& stream) {
    const Head& head = stream.head;
    if (stream.kind == CONTROL) {
        link.words.resize(head.bytes);
        stream.to = link.words.data();
        return true;
    }
    if (stream.kind == MESSAGES) {
        stream.to = take_message(stream.peer, link, head);
        return !engine->failed();
    }
    if (head.number >= next_number[head.lane]) {  // not begun here: it stays where it is
        const Call* next = about_to[head.lane];
        if (next != nullptr && head.number == next_number[head.lane] && !same(*next, call_of(head))) differ(*next, stream.peer, head);
        return false;
    }
    auto found = landings_[head.lane].find(head.number);
    if (found == landings_[head.lane].end()) {
        engine->fail({{}, "the ranks called different operations: " + name(stream.peer) + " " + describe(call_of(head)) + " as number " +
                              std::to_string(head.number) + ", which is over on " + name(rank),
                      "mismatch"});
        return false;
    }
    stream.to = found->second->place(stream.peer, head);
    return stream.to != nullptr;
}

Call call_of(const Head& head) {
    Call call{};
    call.kind = head.kind;
    call.dtype = head.dtype;
    call.op = head.op;
    call.root = head.root;
    call.count = head.count;
    return call;
}

void Tcp::differ(const Call& mine, int peer, const Head& head) {
    engine->fail({{}, "the ranks called different operations: " + name(rank) + " " + describe(mine) + ", " + name(peer) + " " +
                          describe(call_of(head)), "mismatch"});
}

void Tcp::end_frame(Link& link, Stream& stream) {
    const Head& head = stream.head;
    switch (What(head.what)) {
        case What::data: {
            auto found = landings_[head.lane].find(head.number);
            if (found != landings_[head.lane].end()) found->second->landed(stream.peer, head);
            break;
        }
        case What::message:
        case What::offer:
        case What::payload: message_there(stream.peer, link); break;
        case What::ready:
            for (auto& sending : sends_)
                if (sending.number == head.number && sending.message->peer == stream.peer) sending.going = true;
            break;
        case What::credit: link.lent -= std::min(link.lent, head.total); break;
        case What::failure: hear_failure(stream.peer, link); break;
        case What::leave: link.left = true; break;
        default: break;
    }
}

void Tcp::hear_failure(int peer, Link& link) {
    Failure heard;
    int32_t num = 0;
    if (link.words.size() < sizeof num) link.words.resize(sizeof num);  // said nothing
    memcpy(&num, link.words.data(), sizeof num);
    num = std::clamp<int32_t>(num, 0, int32_t(link.words.size() / sizeof num) - 1);
    for (int32_t i = 0; i < num; i++) {
        int32_t blamed;
        memcpy(&blamed, link.words.data() + sizeof num * size_t(i + 1), sizeof blamed);
        if (blamed != rank && blamed >= 0 && blamed < size) heard.peers.push_back(blamed);
    }
    if (heard.peers.empty()) heard.peers.push_back(peer);
    size_t begin = std::min(link.words.size(), sizeof num * size_t(num + 1));
    std::string reason(link.words.data() + begin, link.words.size() - begin);
    bool passed_on = reason.starts_with("rank ") && reason.find(" gave up: ") != std::string::npos;
    heard.cause = "gave up";
    heard.reason = passed_on ? reason : name(peer) + " gave up: " + reason;
    engine->fail(std::move(heard));
}

}  // namespace echelon
