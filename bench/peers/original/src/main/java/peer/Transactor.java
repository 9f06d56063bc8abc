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

/** Whole transactions by Tephra's own client: start, a publish to each topic, canCommit, commit. */
public final class Transactor {
  private final TransactionSystemClient transactions;
  private final List<URL> urls = new ArrayList<>();
  private final int messageBytes;

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

  public static void main(String[] args) throws Exception {
    Options options = new Options(args);
    System.setProperty("http.maxConnections", options.get("connections"));
    Transactor transactor = new Transactor(options);
    Clients.run(options, Collections.nCopies(options.number("connections"), transactor::transact));
  }
}
