# Creates the store's three tables, split into regions, for a deployment in which the daemon may not create tables:
#
#   PLAINSONG_TABLE_PREFIX=plainsong_ PLAINSONG_REGIONS=16 hbase shell -n etc/hbase/tables.rb
#
# The prefix is storage.hbase.table_prefix. Messages and payloads are split into PLAINSONG_REGIONS regions, 1 to 256, by
# the hash at the start of their keys. Choose several per region server, because one region serves a whole topic. Metadata
# starts as one region. Existing tables are left unchanged, so the script may be run again. It uses HBase's Java interface,
# so any JRuby with HBase's jars and configuration can run it.

prefix = ENV.fetch('PLAINSONG_TABLE_PREFIX', 'plainsong_')
regions = Integer(ENV.fetch('PLAINSONG_REGIONS', '16'))
abort "error: PLAINSONG_REGIONS is #{regions}\nhint: 1 to 256" unless (1..256).cover?(regions)

require 'java'

java_import 'org.apache.hadoop.hbase.HBaseConfiguration'
java_import 'org.apache.hadoop.hbase.TableName'
java_import 'org.apache.hadoop.hbase.client.ColumnFamilyDescriptorBuilder'
java_import 'org.apache.hadoop.hbase.client.ConnectionFactory'
java_import 'org.apache.hadoop.hbase.client.TableDescriptorBuilder'
java_import 'org.apache.hadoop.hbase.regionserver.BloomType'

# One version, since rows are written once; a Bloom filter and the block cache for rows read by key. No time to live:
# topics' owners remove expired rows.
family = ColumnFamilyDescriptorBuilder.newBuilder('d'.to_java_bytes)
                                      .setMaxVersions(1)
                                      .setBloomFilterType(BloomType::ROW)
                                      .setBlockCacheEnabled(true)
                                      .build
cuts = (1...regions).map { |index| [index * 256 / regions].pack('C').to_java_bytes }

connection = ConnectionFactory.createConnection(HBaseConfiguration.create)
admin = connection.getAdmin
{ 'metadata' => [], 'messages' => cuts, 'payloads' => cuts }.each do |name, splits|
  table = TableName.valueOf(prefix + name)
  if admin.tableExists(table)
    puts "#{table} is there"
    next
  end
  description = TableDescriptorBuilder.newBuilder(table).setColumnFamily(family).build
  splits.empty? ? admin.createTable(description) : admin.createTable(description, splits.to_java(Java::byte[]))
  puts "#{table} made, #{splits.length + 1} regions"
end
connection.close
