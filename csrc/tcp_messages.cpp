// Messages between two ranks over TCP, with tags.
//
// A sender may be ahead of its receiver by WINDOW_BYTES for each peer: those messages leave at once, and the receiver keeps them
// aside until somebody asks. What goes beyond is only offered, and leaves when the receiver is ready for it. So a tag may be
// taken in any order, and no rank ever holds more than the window for another.
#include <string.h>

#include <algorithm>

#include "tcp.h"

namespace echelon {

namespace {
constexpr uint64_t WINDOW_BYTES = 4 << 20;
uint64_t weight(uint64_t bytes) { return bytes + sizeof(Head); }
}  // namespace

void Tcp::accept(std::shared_ptr<Op> op) {
    auto message = std::static_pointer_cast<Message>(std::move(op));
    if (!message->sends) {
        recvs_.push_back(std::move(message));
        match_kept();
        return;
    }
    Link& link = links_[message->peer];
    bool offered = link.lent + weight(message->bytes) > WINDOW_BYTES;
    Head told = head(offered ? What::offer : What::message);
    told.number = ++num_messages_;
    told.root = message->tag;
    told.total = message->bytes;
    told.bytes = offered ? 0 : message->bytes;
    sends_.push_back({message, told.number, 0, offered, false});
    if (!offered) link.lent += weight(message->bytes);
    send(message->peer, told, message->x, &sends_.back().unsent);
}

bool Tcp::serve(std::vector<std::shared_ptr<Op>>& finished) {
    bool moved = progress();
    for (auto it = sends_.begin(); it != sends_.end() && !engine->failed();) {
        if (it->offered && it->going && it->unsent == 0) {
            Head told = head(What::payload);
            told.number = it->number;
            told.total = told.bytes = it->message->bytes;
            it->offered = false;
            send(it->message->peer, told, it->message->x, &it->unsent);
            moved = true;
        }
        if (it->unsent == 0 && !it->offered) {
            finished_.push_back(it->message);
            it = sends_.erase(it);
        } else {
            ++it;
        }
    }
    if (engine->failed()) return true;  // drop() gives all of them back
    moved |= !finished_.empty();
    std::move(finished_.begin(), finished_.end(), std::back_inserter(finished));
    finished_.clear();
    return moved;
}

std::vector<std::shared_ptr<Op>> Tcp::drop() {
    std::vector<std::shared_ptr<Op>> all(recvs_.begin(), recvs_.end());
    for (auto& sending : sends_) all.push_back(sending.message);
    std::move(finished_.begin(), finished_.end(), std::back_inserter(all));
    for (auto& link : links_) {
        if (link.into) all.push_back(std::move(link.into));
        for (auto& [offer, message] : link.promised) all.push_back(message);
        link.into.reset();
        link.promised.clear();
        for (auto& stream : link.streams) {  // nothing here points at anybody's memory any more
            stream.queue.clear();
            stream.open = stream.readable = false;
        }
    }
    sends_.clear();
    recvs_.clear();
    finished_.clear();
    num_coming_ = 0;
    for (auto& lane : landings_) lane.clear();
    for (auto& call : about_to) call = nullptr;
    return all;
}

std::vector<int> Tcp::served_behind() const {
    std::vector<int> ranks;
    bool anybody = false, all_gone = true;
    for (auto& sending : sends_) ranks.push_back(sending.message->peer);
    for (auto& message : recvs_) message->peer < 0 ? void(anybody = true) : ranks.push_back(message->peer);
    for (int peer = 0; peer < size; peer++) {
        if (links_[peer].into || !links_[peer].promised.empty()) ranks.push_back(peer);
        if (peer != rank) all_gone &= links_[peer].left;
    }
    for (int peer = 0; peer < size && anybody && all_gone; peer++)  // lost only when everybody else is
        if (peer != rank) ranks.push_back(peer);
    return ranks;
}

std::shared_ptr<Message> Tcp::wanted(int peer, int32_t tag) {
    auto found = std::find_if(recvs_.begin(), recvs_.end(),
                              [&](auto& m) { return (m->peer == peer || m->peer < 0) && m->tag == tag && !m->claimed; });
    if (found == recvs_.end()) return nullptr;
    auto message = std::move(*found);
    recvs_.erase(found);
    message->peer = peer;
    message->claimed = true;
    return message;
}

bool Tcp::fits(int peer, uint64_t bytes, const Message& message) {
    if (bytes == message.bytes) return true;
    engine->fail({{peer}, "rank " + std::to_string(peer) + " sent " + std::to_string(bytes) + " bytes (tag " +
                              std::to_string(message.tag) + ") to a recv of " + std::to_string(message.bytes) + " bytes", "mismatch"});
    return false;
}

// A header has come: where its payload goes. An offer has none.
char* Tcp::take_message(int peer, Link& link, const Head& head) {
    if (What(head.what) == What::payload) {
        auto found = link.promised.find(head.number);
        if (found == link.promised.end() || found->second->bytes != head.bytes) {
            engine->fail({{peer}, "rank " + std::to_string(peer) + " sent a message that nobody asked for", "broken"});
            return nullptr;
        }
        link.into = std::move(found->second);
        link.promised.erase(found);
        link.coming.offered = true;
        return link.into->x;
    }
    const bool offered = What(head.what) == What::offer;
    const bool fits_window = head.bytes <= WINDOW_BYTES && link.borrowed + weight(head.bytes) <= WINDOW_BYTES;
    if (head.number <= link.heard || head.bytes != (offered ? 0 : head.total) || (!offered && !fits_window)) {
        engine->fail({{peer}, "rank " + std::to_string(peer) + " sent something that is not a message", "broken"});
        return nullptr;
    }
    link.heard = head.number;
    link.coming = {head.root, head.total, head.number, offered, {}};
    if (!offered) {
        link.borrowed += weight(head.bytes);
        link.into = wanted(peer, head.root);
    }
    if (link.into) {
        num_coming_++;
        return fits(peer, head.total, *link.into) ? link.into->x : nullptr;
    }
    link.coming.stash.resize(head.bytes + 1);  // never nowhere
    return link.coming.stash.data();
}

void Tcp::message_there(int peer, Link& link) {
    if (!link.into) {
        link.kept.push_back(std::move(link.coming));
        return match_kept();
    }
    if (!link.coming.offered) credit(peer, link, link.coming.bytes);
    num_coming_--;
    finished_.push_back(std::move(link.into));
    link.into.reset();
}

// Gives what was kept aside to those who ask now.
void Tcp::match_kept() {
    for (int peer = 0; peer < size; peer++) {
        Link& link = links_[peer];
        for (auto it = link.kept.begin(); it != link.kept.end();) {
            auto message = wanted(peer, it->tag);
            if (!message) {
                ++it;
                continue;
            }
            if (!fits(peer, it->bytes, *message)) return finished_.push_back(std::move(message));
            if (it->offered) {
                num_coming_++;
                Head told = head(What::ready);
                told.number = it->offer;
                link.promised[it->offer] = std::move(message);
                say(peer, told);
            } else {
                if (it->bytes > 0) memcpy(message->x, it->stash.data(), it->bytes);
                credit(peer, link, it->bytes);
                finished_.push_back(std::move(message));
            }
            it = link.kept.erase(it);
        }
    }
}

// Tells a sender that its messages were taken, not for each one.
void Tcp::credit(int peer, Link& link, uint64_t bytes) {
    link.owed += weight(bytes);
    if (link.owed < WINDOW_BYTES / 4) return;
    Head told = head(What::credit);
    told.total = link.owed;
    link.borrowed -= link.owed;
    link.owed = 0;
    say(peer, told);
}

}  // namespace echelon
