package peer;

import io.cdap.cdap.messaging.Schemas;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.net.HttpURLConnection;
import java.net.URL;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.io.Encoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.hadoop.conf.Configuration;
import org.apache.tephra.Transaction;
import org.apache.tephra.TransactionSystemClient;
import org.apache.tephra.TxConstants;
import org.apache.tephra.distributed.PooledClientProvider;
import org.apache.tephra.distributed.TransactionServiceClient;

/** Whole transactions by Tephra's own client: start, a publish to each topic, canCommit, commit; prints a JSON object. */
public final class Transactor {
  private final TransactionSystemClient transactions;
  private final List<URL> urls = new ArrayList<>();
  private final int messageBytes;
  private volatile long countsFrom = Long.MAX_VALUE;
  private volatile long endsAt = Long.MAX_VALUE;

  Transactor(Options options) throws Exception {
    Configuration conf = new Configuration();
    conf.set(TxConstants.Service.CFG_DATA_TX_BIND_ADDRESS, "127.0.0.1");
    conf.set(TxConstants.Service.CFG_DATA_TX_BIND_PORT, options.get("tephra"));
    conf.setInt(TxConstants.Service.CFG_DATA_TX_CLIENT_COUNT, options.number("connections"));
    PooledClientProvider provider = new PooledClientProvider(conf, null);
    provider.initialize();
    transactions = new TransactionServiceClient(conf, provider);
    for (String path : options.get("paths").split(",")) {
      urls.add(new URL("http://127.0.0.1:" + options.get("port") + path));
    }
    messageBytes = options.number("message-bytes");
  }

  private static byte[] body(long pointer, int size) throws IOException {
    byte[] payload = new byte[size];
    Arrays.fill(payload, (byte) 'x');
    GenericData.Record request = new GenericData.Record(Schemas.V1.PublishRequest.SCHEMA);
    request.put("transactionWritePointer", pointer);
    request.put("messages", Collections.singletonList(ByteBuffer.wrap(payload)));
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    Encoder encoder = EncoderFactory.get().directBinaryEncoder(out, null);
    new GenericDatumWriter<GenericData.Record>(Schemas.V1.PublishRequest.SCHEMA).write(request, encoder);
    return out.toByteArray();
  }

  private void publish(URL url, byte[] body) throws IOException {
    HttpURLConnection connection = (HttpURLConnection) url.openConnection();
    connection.setRequestMethod("POST");
    connection.setRequestProperty("Content-Type", "avro/binary");
    connection.setDoOutput(true);
    connection.setFixedLengthStreamingMode(body.length);
    try (OutputStream out = connection.getOutputStream()) {
      out.write(body);
    }
    if (connection.getResponseCode() != 200) {
      throw new IOException(url + ": " + connection.getResponseCode());
    }
    connection.getInputStream().readAllBytes(); // so that the connection is kept
  }

  private void transact() throws Exception {
    Transaction transaction = transactions.startShort();
    for (URL url : urls) {
      publish(url, body(transaction.getWritePointer(), messageBytes));
    }
    List<byte[]> changes = Collections.emptyList();
    if (!transactions.canCommit(transaction, changes) || !transactions.commit(transaction)) {
      throw new IOException("it was not committed");
    }
  }

  /** Runs one client until the end; returns the times of its transactions, in nanoseconds. */
  private List<Long> run() throws Exception {
    List<Long> took = new ArrayList<>();
    long begun = System.nanoTime();
    while (begun < endsAt) {
      transact();
      long ended = System.nanoTime();
      if (begun >= countsFrom && ended <= endsAt) {
        took.add(ended - begun);
      }
      begun = ended;
    }
    return took;
  }

  public static void main(String[] args) throws Exception {
    Options options = new Options(args);
    Transactor transactor = new Transactor(options);
    System.setProperty("http.maxConnections", options.get("connections"));
    double seconds = Double.parseDouble(options.get("seconds"));
    transactor.transact(); // loads classes and connects, which may take seconds
    // Not counted at first: the virtual machines compile.
    transactor.countsFrom = System.nanoTime() + (long) (1e9 * Double.parseDouble(options.get("warm-up")));
    transactor.endsAt = transactor.countsFrom + (long) (1e9 * seconds);
    List<Long> took = Collections.synchronizedList(new ArrayList<>());
    AtomicReference<Exception> failure = new AtomicReference<>();
    List<Thread> clients = new ArrayList<>();
    for (int i = 0; i < options.number("connections"); i++) {
      Thread client = new Thread(() -> {
        try {
          took.addAll(transactor.run());
        } catch (Exception e) {
          failure.set(e);
        }
      });
      client.start();
      clients.add(client);
    }
    for (Thread client : clients) {
      client.join();
    }
    if (failure.get() != null) {
      failure.get().printStackTrace();
      System.exit(1);
    }
    Collections.sort(took);
    System.out.printf("{\"requests\": %d, \"seconds\": %.3f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f}%n",
        took.size(), seconds, at(took, 0.5), at(took, 0.99), at(took, 1.0));
    System.exit(0); // the pool's threads would keep it
  }

  private static double at(List<Long> sorted, double share) {
    return sorted.isEmpty() ? 0 : sorted.get((int) Math.min(sorted.size() - 1, share * sorted.size())) / 1e6;
  }
}
