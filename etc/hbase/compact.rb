# Gives the space of removed rows back: writes what is in memory to files, then rewrites all files of the store's tables.
#
#   PLAINSONG_TABLE_PREFIX=plainsong_ hbase shell -n etc/hbase/compact.rb
#
# The prefix is storage.hbase.table_prefix. Region by region every file is read and written once, which goes on after this
# has ended: for quiet hours, behind much that was removed. Daemons may serve meanwhile. HBase does the same by itself, by
# default once a week. It cannot be asked for through the Thrift gateway, which makes a smaller compaction of it.

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
