# Reclaims the space of removed rows: flushes memory to files, then rewrites all files of the store's tables.
#
#   PLAINSONG_TABLE_PREFIX=plainsong_ hbase shell -n etc/hbase/compact.rb
#
# The prefix is storage.hbase.table_prefix. HBase reads and rewrites every file once, region by region, and continues after
# this script has ended: run it in quiet hours, after large removals. Daemons can continue to serve. HBase does the same by
# itself, by default once a week. A request through the Thrift gateway starts only a minor compaction.

prefix = ENV.fetch('PLAINSONG_TABLE_PREFIX', 'plainsong_')

require 'java'

java_import 'org.apache.hadoop.hbase.HBaseConfiguration'
java_import 'org.apache.hadoop.hbase.TableName'
java_import 'org.apache.hadoop.hbase.client.ConnectionFactory'

connection = ConnectionFactory.createConnection(HBaseConfiguration.create)
admin = connection.getAdmin
%w[metadata messages payloads].each do |name|
  table = TableName.valueOf(prefix + name)
  abort "error: there is no table #{table}\nhint: say PLAINSONG_TABLE_PREFIX" unless admin.tableExists(table)
  admin.flush(table)
  admin.majorCompact(table)
  puts "#{table} is being compacted"
end
connection.close
