// How readers and one writer share a shard without a lock per row.
//
// A reader works in short turns. Inside a turn it looks at a shard's `written` flag first; where it
// is set, the key is put off until the turn is over. A writer sets the flag, then waits until every
// reader that was inside a turn has left it. After that nobody reads the shard or its rows, and a
// turn that begins later sees the flag. Flag and turns are sequentially consistent: of "writer sets
// the flag, then looks at the turn" and "reader begins the turn, then looks at the flag", at least
// one sees the other. A reader pays one exchange per turn, and nothing per row.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

namespace nestpipe {

constexpr int kReaders = 128;

class Gate {
  struct alignas(64) Seat {
    std::atomic<uint64_t> turn{0};  // odd: inside a turn
    std::atomic<bool> taken{false};
  };

 public:
  // One thread's place at the gate, for as long as it reads.
  class Reader {
   public:
    explicit Reader(Gate& gate) : seat_(gate.take_seat()), turn_(seat_.turn.load()) {}
    ~Reader() { seat_.taken.store(false, std::memory_order_release); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    void begin_turn() { seat_.turn.store(++turn_, std::memory_order_seq_cst); }
    void end_turn() { seat_.turn.store(++turn_, std::memory_order_release); }

   private:
    Seat& seat_;
    uint64_t turn_;
  };

  // Returns once every turn that had begun before has ended.
  void wait_for_readers() const {
    for (const Seat& seat : seats_) {
      const uint64_t turn = seat.turn.load(std::memory_order_seq_cst);
      if (turn % 2 == 0) continue;
      while (seat.turn.load(std::memory_order_acquire) == turn) std::this_thread::yield();
    }
  }

 private:
  Seat& take_seat() {
    while (true) {
      for (Seat& seat : seats_) {
        if (!seat.taken.load(std::memory_order_relaxed) &&
            !seat.taken.exchange(true, std::memory_order_acquire)) {
          return seat;
        }
      }
      std::this_thread::yield();
    }
  }

  std::array<Seat, kReaders> seats_;
};

}  // namespace nestpipe
