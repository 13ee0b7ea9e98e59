// Which rows of a large step each thread has for itself: as many as it is quick. Leaves what is done with them to decoder.h.
//
// A processor whose core is shared with a neighbour takes twice as long as the one beside it, for milliseconds or minutes;
// each layer's rows are therefore shared out by what the threads took for those of the layer before.
#pragma once

#include <time.h>

#include "attention_team.h"

namespace radixfleet {
namespace {

struct Shares {
  static constexpr int kUnit = 32;  // rows of a block of products
  const int rows;
  double* const paces;  // [2][threads], seconds a row; two, since a thread may still read while another is a layer ahead
  Range range;
  double started;

  static size_t bytes(int threads) { return 2 * threads * sizeof(double); }
  static double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
  }
  // This thread's rows where its part of the speed of all is `mine`, and that of the threads before it `before`.
  Range part(double before, double mine) const {
    const int first = whole(before), last = thread_number() + 1 == thread_count() ? rows : whole(before + mine);
    return {first, last};
  }
  int whole(double part) const {
    const int row = (int)(part * rows / kUnit + 0.5) * kUnit;
    return row < rows ? row : rows;
  }

  // All alike at first.
  Shares(int tokens, double* memory)
      : rows(tokens),
        paces(memory),
        range(part((double)thread_number() / thread_count(), 1.0 / thread_count())),
        started(seconds()) {}

  // Before threads meet: how long this one has taken.
  void done(int layer) {
    const int count = range.last - range.first;
    paces[layer % 2 * thread_count() + thread_number()] = count > 0 ? (seconds() - started) / count : 0;
  }
  // After it: this thread's rows from now on.
  void share(int layer) {
    const double* pace = paces + layer % 2 * thread_count();
    double all = 0, before = 0, mine = 0;
    for (int i = 0; i < thread_count(); i++) {
      const double speed = pace[i] > 0 ? 1 / pace[i] : 0;
      all += speed;
      if (i < thread_number()) before += speed;
      if (i == thread_number()) mine = speed;
    }
    if (all > 0) range = part(before / all, mine / all);
    started = seconds();
  }
};

}  // namespace
}  // namespace radixfleet
