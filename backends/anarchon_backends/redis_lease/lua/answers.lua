-- Answers, and the news that go with them.

-- The answers of `judge(item, key)` in the batch's order; `more` have keys before the items'.
local function answers_of(items, judge, more)
  local answers = {}
  for i, item in ipairs(items) do
    local key = KEYS[BEFORE + (more or 0) + i]
    local answer, why = unless_broken(judge, item, key)
    answer = answer or { outcome = 'broken', broken = why }
    answer.fence = answer.fence or fence_of(key)
    answers[i] = answer
  end
  return answers
end

-- Whether there are news: of single runs, or that what waits may go on, as another run has ended.
local function has_news()
  for key, job in pairs(ended_in) do
    if news > 0 then
      break
    end
    news = oldest_due(key, job) and 1 or 0
  end
  return news > 0
end

-- Wakes whoever watches, where there are news; nothing depends on it (S19).
local function reply(fields)
  fields.news = has_news()
  if fields.news and NS then
    local times = redis.call('HINCRBY', NS, 'news', 1)
    redis.pcall('PUBLISH', NS .. ':news', times)
  end
  if batch.durable and #KEYS > BEFORE then
    -- A repeated call may have nothing to write, and waiting for replicas or the disk means this
    -- connection's last write. With this one, all that stood in the server before is waited for.
    redis.call('HSET', KEYS[#KEYS], 'asked_at', text(NOW))
  end
  fields.now_us, fields.store_id = text(NOW_US), meta[2]
  return cjson.encode(fields)
end
