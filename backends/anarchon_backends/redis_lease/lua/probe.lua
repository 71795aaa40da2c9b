-- Tries every command that the other scripts use, before anything depends on one: a command that
-- is not permitted would otherwise stop a script after its first write.

local probe = KEYS[1] .. ':probe'
redis.call('TIME')
redis.call('HSET', probe, 'a', '1', 'b', '2')
redis.call('HMGET', probe, 'a', 'b')
redis.call('HGET', probe, 'a')
redis.call('HGETALL', probe)
redis.call('HKEYS', probe)
redis.call('HINCRBY', probe, 'a', 1)
redis.call('HDEL', probe, 'a')
redis.call('EXISTS', probe)
redis.call('DEL', probe)
redis.call('ZADD', probe, 1, 'a')
redis.call('ZRANGE', probe, 0, -1)
redis.call('ZREVRANGE', probe, 0, 0)
redis.call('ZRANGEBYSCORE', probe, '-inf', '+inf', 'LIMIT', 0, 1)
redis.call('ZRANGEBYLEX', probe, '-', '+', 'LIMIT', 0, 1)
redis.call('ZREM', probe, 'a')
redis.call('DEL', probe)
redis.call('SADD', probe, 'a')
redis.call('SMEMBERS', probe)
redis.call('SREM', probe, 'a')
redis.call('DEL', probe)
local published = redis.pcall('PUBLISH', batch.channel, '')
local exact = text(1791633610123456) == '1791633610123456'
return reply({ publishes = type(published) == 'number', exact = exact })
