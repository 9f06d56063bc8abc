package peer;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.UUID;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Whole transactions by Kafka's own producer: begin, a message to each topic, commit. */
public final class Transactor {
  private final KafkaProducer<byte[], byte[]> producer;
  private final List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();

  Transactor(Options options) {
    Properties settings = new Properties();
    settings.put(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, "127.0.0.1:" + options.get("port"));
    settings.put(ProducerConfig.TRANSACTIONAL_ID_CONFIG, UUID.randomUUID().toString());
    settings.put(ProducerConfig.ACKS_CONFIG, "all");
    settings.put(ProducerConfig.KEY_SERIALIZER_CLASS_CONFIG, ByteArraySerializer.class.getName());
    settings.put(ProducerConfig.VALUE_SERIALIZER_CLASS_CONFIG, ByteArraySerializer.class.getName());
    producer = new KafkaProducer<>(settings);
    byte[] payload = new byte[options.number("message-bytes")];
    Arrays.fill(payload, (byte) 'x');
    for (String topic : options.get("topics").split(",")) {
      records.add(new ProducerRecord<>(topic, payload));
    }
    producer.initTransactions();
  }

  private void transact() {
    producer.beginTransaction();
    records.forEach(producer::send); // a message that fails makes the commit fail
    producer.commitTransaction();
  }

  public static void main(String[] args) throws Exception {
    Options options = new Options(args);
    List<Clients.Client> clients = new ArrayList<>();
    for (int i = 0; i < options.number("connections"); i++) {
      clients.add(new Transactor(options)::transact);
    }
    Clients.run(options, clients);
  }
}
