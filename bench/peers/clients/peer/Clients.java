package peer;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.atomic.AtomicReference;

/** Clients that run transactions at the same time, each one after the other; prints the result as a JSON object. */
final class Clients {
  /** A client with connections of its own. */
  interface Client {
    void transact() throws Exception;
  }

  private final long countsFrom;
  private final long endsAt;

  private Clients(long countsFrom, long endsAt) {
    this.countsFrom = countsFrom;
    this.endsAt = endsAt;
  }

  /** Runs them for {@code --warm-up} and then {@code --seconds}; the JVMs compile during the warm-up, so it does not count. */
  static void run(Options options, List<Client> clients) throws Exception {
    for (Client client : clients) {
      client.transact(); // loads classes and connects, which may take seconds
    }
    double seconds = Double.parseDouble(options.get("seconds"));
    long countsFrom = System.nanoTime() + (long) (1e9 * Double.parseDouble(options.get("warm-up")));
    Clients running = new Clients(countsFrom, countsFrom + (long) (1e9 * seconds));
    List<Long> took = Collections.synchronizedList(new ArrayList<>());
    AtomicReference<Exception> failure = new AtomicReference<>();
    List<Thread> threads = new ArrayList<>();
    for (Client client : clients) {
      Thread thread = new Thread(() -> {
        try {
          took.addAll(running.times(client));
        } catch (Exception e) {
          failure.set(e);
        }
      });
      thread.start();
      threads.add(thread);
    }
    for (Thread thread : threads) {
      thread.join();
    }
    if (failure.get() != null) {
      failure.get().printStackTrace();
      System.exit(1);
    }
    Collections.sort(took);
    System.out.printf("{\"requests\": %d, \"seconds\": %.3f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f}%n",
        took.size(), seconds, at(took, 0.5), at(took, 0.99), at(took, 1.0));
    System.exit(0); // threads of the clients' libraries would keep the process
  }

  /** Runs one client until the end; returns the times of its transactions, in nanoseconds. */
  private List<Long> times(Client client) throws Exception {
    List<Long> took = new ArrayList<>();
    long begun = System.nanoTime();
    while (begun < endsAt) {
      client.transact();
      long ended = System.nanoTime();
      if (begun >= countsFrom && ended <= endsAt) {
        took.add(ended - begun);
      }
      begun = ended;
    }
    return took;
  }

  private static double at(List<Long> sorted, double share) {
    return sorted.isEmpty() ? 0 : sorted.get((int) Math.min(sorted.size() - 1, share * sorted.size())) / 1e6;
  }
}
