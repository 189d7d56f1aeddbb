// TCP among hosts: a mesh of connections that somebody else made and authenticated, several to each peer.
//
// Each peer has one stream for control (credits, failures, goodbyes), one for messages, and a set a lane, so that what is held
// back on one never holds up another. A frame is a header and a payload. The header says which operation it belongs to and
// what the sender called; the payload goes straight into its place. A frame whose operation has not begun here, or whose place
// is not free yet, stays in the socket: the sender is slowed down by TCP itself, and memory stays bounded.
//
// Every descriptor is watched edge-triggered: `readable` and `writable` hold until the kernel says otherwise.
// A host that vanishes is noticed by the kernel's own probes on the control stream, which is idle: no thread has to beat, and
// a rank that computes for minutes is not taken for a dead one. (TCP_USER_TIMEOUT on a data stream would do that: Linux
// counts the time in which a receiver holds the sender back.)
#pragma once

#include <list>

#include "cost.h"
#include "shm.h"

namespace echelon {

enum class What : uint8_t { data = 1, message, offer, payload, ready, credit, failure, leave, knock, count };

struct Head {
    uint32_t magic;
    uint8_t what, lane;
    uint16_t slot;        // which part of the operation
    uint64_t term;
    uint64_t number;      // of the operation in its lane, or of the message
    uint64_t offset;      // of the payload in its slot
    uint64_t bytes;       // of the payload
    uint64_t total;       // of the slot
    uint8_t kind, dtype, op, spare;
    int32_t root;         // a message's tag
    uint64_t count;
};
static_assert(sizeof(Head) == 64);
Call call_of(const Head& head);

// What frames of one operation land in. place() and landed() are called by whoever drives.
class Landing {
  public:
    virtual ~Landing() = default;
    // Where the payload goes; nullptr: not yet, or never (the engine has failed).
    virtual char* place(int peer, const Head& head) = 0;
    virtual void landed(int peer, const Head& head) = 0;
};

class Tcp final : public Transport {
  public:
    struct Options {
        uint64_t term = 0;
        double limit_s = 10;     // a host that is silent for so long is lost
        std::string congestion;  // which control the kernel uses; empty: the system's
    };
    // streams[peer]: control, messages, then the same number for each lane. Takes the descriptors over. Empty for my own rank.
    Tcp(int rank, const std::vector<std::vector<int>>& streams, Options options);
    ~Tcp() override;

    const int rank, size;
    Costs costs;

    // --- for operations
    // Sends frames of an operation: `unsent` goes up by one now, and down when the payload may be changed.
    void send(int peer, const Head& head, const char* payload, uint32_t* unsent);
    Head head(What what) const;
    void open(int lane, uint64_t number, Landing* landing) { landings_[lane][number] = landing; }
    void shut(int lane, uint64_t number) { landings_[lane].erase(number); }
    uint64_t next_number[NUM_LANES] = {};   // of operations begun here
    const Call* about_to[NUM_LANES] = {};   // what the next number will belong to, if that is known already
    bool progress();                        // reads and writes what can be; true when anything moved
    int streams_per_lane() const { return per_lane_; }
    std::unique_ptr<char[]> borrow(uint64_t bytes, uint64_t& capacity);  // scratch, reused
    void give_back(std::unique_ptr<char[]> scratch, uint64_t capacity);
    void knock(int peer);                   // ends a rest() over there
    void after_fork();                      // in a child: lets go of every descriptor, quietly

    // --- Transport
    void arm() override {}
    void rest(int64_t ns) override;
    void disarm() override {}
    void wake() override;
    bool trouble(const std::vector<int>& behind, Failure& failure) override;
    void tell(const Failure& failure) override;
    void leave() override;
    void accept(std::shared_ptr<Op> op) override;
    bool serve(std::vector<std::shared_ptr<Op>>& finished) override;
    std::vector<std::shared_ptr<Op>> drop() override;
    size_t num_served() const override { return sends_.size() + recvs_.size() + num_coming_ + finished_.size(); }
    std::vector<int> served_behind() const override;

    void forget_claimed() { std::erase_if(recvs_, [](auto& message) { return message->claimed; }); }
    void differ(const Call& mine, int peer, const Head& head);  // fails: the ranks called different operations

  private:
    static constexpr uint32_t MAGIC = 0x6563'6831;                     // "ech1"
    static constexpr int CONTROL = 0, MESSAGES = 1, FIRST_LANE = 2;     // what a stream is for
    static constexpr size_t AHEAD_BYTES = 4096;
    static constexpr uint64_t BUDGET_BYTES = 1 << 20;                  // of one stream, before the others get their turn
    static constexpr uint64_t MAX_WORDS = 1024;                        // of a failure
    static std::string name(int rank) { return "rank " + std::to_string(rank); }

    struct Outgoing {
        Head head;
        const char* payload;
        uint64_t done;      // header included
        uint32_t* unsent;
    };
    struct Stream {
        int fd = -1, peer = 0, kind = 0;  // kind: CONTROL, MESSAGES, or FIRST_LANE + lane
        bool readable = true, writable = true, hung_up = false, ended = false;
        std::deque<Outgoing> queue;
        Head head{};             // of the frame that is being taken
        bool open = false, placed = false;  // head is there; so is the place of its payload
        char* to = nullptr;
        uint64_t done = 0;       // of the payload
        std::vector<char> ahead; // bytes read too early
        size_t ahead_at = 0, ahead_end = 0;
    };
    struct Coming {  // a message on its way to me
        int32_t tag = 0;
        uint64_t bytes = 0, offer = 0;     // offer: its number, when the sender waits for a word
        bool offered = false;
        std::vector<char> stash;
    };
    struct Link {
        std::vector<Stream> streams;
        std::string control;               // to be written on the control stream
        std::vector<char> words;           // a failure's payload
        bool left = false, closed = false; // said goodbye; gone without one
        std::string why;
        const char* cause = "dead";
        int64_t ended_ns = 0;              // when a data stream ended first
        // messages
        uint64_t lent = 0;                 // bytes sent that it has not taken yet
        uint64_t owed = 0;                 // bytes taken here that it was not told of
        uint64_t borrowed = 0;             // bytes it sent and was not told of: never more than the window
        uint64_t heard = 0;                // the last number of its messages and offers
        std::deque<Coming> kept;           // nobody has asked for these yet
        Coming coming;                     // the one that is being taken
        std::shared_ptr<Message> into;
        std::map<uint64_t, std::shared_ptr<Message>> promised;  // by offer: told to send
    };
    struct Sending { std::shared_ptr<Message> message; uint64_t number; uint32_t unsent; bool offered, going; };

    void watch(Stream& stream);
    void note(int timeout_ms);             // epoll -> flags
    bool write(Stream& stream);
    bool write_control(Link& link);
    void ended(Link& link, Stream& stream, const std::string& why);
    void say(int peer, const Head& head, const void* payload = nullptr);  // on the control stream; from any thread
    // reading (tcp_read.cpp)
    bool read(Link& link, Stream& stream); // until nothing is there, or a frame has no place yet
    bool advance(Link& link, Stream& stream);  // from what was read ahead
    ssize_t fill(Stream& stream);          // from the socket into the place, and a little ahead
    bool sound(const Stream& stream);      // the header may stand where it stands; otherwise the engine has failed
    bool begin_frame(Link& link, Stream& stream);  // finds the place; false: not yet
    void end_frame(Link& link, Stream& stream);
    void hear_failure(int peer, Link& link);
    // messages (tcp_messages.cpp)
    char* take_message(int peer, Link& link, const Head& head);
    void message_there(int peer, Link& link);
    void match_kept();
    void credit(int peer, Link& link, uint64_t bytes);
    std::shared_ptr<Message> wanted(int peer, int32_t tag);
    bool fits(int peer, uint64_t bytes, const Message& message);

    const Options options_;
    int per_lane_ = 1, epoll_ = -1, bell_ = -1;
    std::vector<Link> links_;
    std::map<uint64_t, Landing*> landings_[NUM_LANES];
    std::vector<std::pair<std::unique_ptr<char[]>, uint64_t>> spare_;
    std::mutex control_lock_;              // of every link's `control`
    bool gone_ = false;                    // left, or forked
    std::list<Sending> sends_;
    std::deque<std::shared_ptr<Message>> recvs_;
    size_t num_coming_ = 0;                // messages that are being received into their place
    uint64_t num_messages_ = 0;
    std::vector<std::shared_ptr<Op>> finished_;
};

}  // namespace echelon
