-- What instances held of jobs, and hold no more (S28).

return reply({
  answers = answers_of(batch.items, function(item, key)
    let_go_of(key, item.incarnation, item.at or NOW, item['until'])
    return {}
  end),
})
